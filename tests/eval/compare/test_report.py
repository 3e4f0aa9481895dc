"""`depth compare` as a reader meets it."""

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval.compare.command import write_report
from eval.compare.page import Page
from torchtitan_ext import cli

from .conftest import Recorded, as_a_user, straight


def depth_compare(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from torchtitan_ext import cli; "
        "cli.COMMANDS['compare'] = ('eval.compare.command', ''); sys.exit(cli.main())"
    )
    command = [sys.executable, "-c", code, "compare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


HOSTILE = "<b>&|`$x_1$"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report over a baseline, a good variant, one that looks inside itself, and one whose name is a trap."""
    folder = tmp_path_factory.mktemp("compare")
    runs = folder / "runs"
    look = {"depth/gradient_norm/00": 0.5, "depth/gradient_norm/01": 0.2, "depth/weights": [[1.0], [0.5, 0.5]]}
    for seed in (0, 1, 2):
        noise = (0.0, 0.003, -0.004)[seed]
        Recorded(straight(8, 4.0), seed=seed).write(runs / f"s{seed}")
        gate = Recorded(straight(8, 3.95 + noise), variant="m_gate_kv", seed=seed, step_seconds=0.6, extra=look)
        marks = gate.write(runs / f"g{seed}") / "eval" / "marks.json"
        marks.parent.mkdir()
        tasks = {"<i>|`": {"acc": 0.5, "acc_stderr": 0.1}}
        marks.write_text(json.dumps({"format": 1, "step": 100, "precision": "bf16", "tasks": tasks}))
        Recorded(straight(8, 4.0 - 3 * noise), variant=HOSTILE, seed=seed).write(runs / f"h{seed}")
    Recorded(variant="moda", state="diverged").write(runs / "moda")
    Recorded(variant="moda", data={"fingerprint": "<i>&"}).write(runs / "elsewhere")
    done = depth_compare(runs, "--out", folder / "report")
    assert done.returncode == 0, done.stderr
    (folder / "report" / "stdout.txt").write_text(done.stdout)
    return folder / "report"


@pytest.fixture(scope="module")
def html(report: Path) -> ElementTree.Element:
    text = (report / "report.html").read_text(encoding="utf-8")
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))


def test_the_page_asks_nothing_of_anyone(report: Path, html: ElementTree.Element) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    assert "http" not in text
    assert "<script" not in text
    assert "@import" not in text
    for element in html.iter():
        for attribute, value in element.attrib.items():
            if attribute in ("href", "src"):
                assert value.startswith(("#", "data:")), value


def test_the_page_fits_phones_and_follows_the_readers_theme(report: Path, html: ElementTree.Element) -> None:
    text = (report / "report.html").read_text(encoding="utf-8")
    assert "width=device-width" in text
    assert "prefers-color-scheme: dark" in text
    inside = {table for box in html.iter("div") if box.get("class") == "box" for table in box.iter("table")}
    assert inside == set(html.iter("table"))
    colours = set(
        re.findall(r"#[0-9a-f]{6}", "".join(ElementTree.tostring(svg, "unicode") for svg in html.iter("svg")))
    )
    assert colours == set()  # every colour of a picture is one of the page's


def test_ids_are_unique_and_every_reference_has_its_target(html: ElementTree.Element) -> None:
    ids = [element.get("id") for element in html.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    for element in html.iter():
        for value in element.attrib.values():
            for target in re.findall(r"url\(#([^)]*)\)|^#(.+)$", value):
                assert "".join(target) in ids


def rows(html: ElementTree.Element) -> Iterator[tuple[str, ElementTree.Element]]:
    for row in html.iter("tr"):
        yield "".join(row[0].itertext()), row


def test_names_are_shown_as_they_are(report: Path, html: ElementTree.Element) -> None:
    shown = HOSTILE.replace("`", "'")
    assert shown in [title for title, _ in rows(html)]
    assert list(html.iter("b")) == []
    assert list(html.iter("i")) == []
    assert any("training data aaaa in standard, <i>& here" in "".join(item.itertext()) for item in html.iter("li"))
    markdown = (report / "report.md").read_text(encoding="utf-8")
    table_rows = [line for line in markdown.splitlines() if line.startswith("| `<b>")]
    assert table_rows
    assert "&lt;i>& here" in markdown
    assert all("\\|" in line for line in table_rows)


def test_every_table_says_what_it_shows(html: ElementTree.Element) -> None:
    """Right before or behind each table stands text."""
    for parent in html.iter():
        children = list(parent)
        for index, child in enumerate(children):
            if child.get("class") == "box":
                around = children[max(0, index - 1) : index + 2]
                assert any(other.tag in ("p", "ul") for other in around)


def test_markdown_shows_the_same_tables_and_all_pictures(report: Path, html: ElementTree.Element) -> None:
    markdown = (report / "report.md").read_text(encoding="utf-8")
    assert markdown.count("\n|---") == len(list(html.iter("table")))
    pictures = re.findall(r"\]\((pictures/[^)]+)\)", markdown)
    assert len(pictures) == len(list(html.iter("svg")))
    assert {f"pictures/{path.name}" for path in (report / "pictures").iterdir()} == set(pictures)
    for picture in pictures:
        assert ElementTree.parse(report / picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_every_table_is_kept_as_csv_and_latex_too(report: Path, html: ElementTree.Element) -> None:
    def cells(table: ElementTree.Element) -> list[list[str]]:
        return [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]

    shown = sorted(cells(table) for table in html.iter("table"))
    files = sorted((report / "tables").glob("*.csv"))
    assert sorted(list(csv.reader(file.open(encoding="utf-8", newline=""))) for file in files) == shown
    for file in files:
        rows = len(file.read_text(encoding="utf-8").splitlines())
        assert file.with_suffix(".tex").read_text(encoding="utf-8").count(" \\\\\n") == rows


def test_results_are_strict_json_with_the_numbers_of_the_report(report: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    results = json.loads((report / "results.json").read_text(), parse_constant=refuse)
    assert results["format"] == 3
    (family,) = results["families"]
    gate = next(group for group in family["groups"] if group["label"] == "m_gate_kv")
    # Final losses 3.95 + noise, noise 0, 0.003 and −0.004, against 4.0.
    assert gate["difference"]["mean"] == pytest.approx(-0.05 - 0.001 / 3)
    assert f"{gate['difference']['mean']:+.4f}" in (report / "report.md").read_text()
    assert [(out["name"], out["diverged"]) for out in results["left_out"]] == [("moda", True), ("elsewhere", False)]


def test_what_was_left_out_is_said(report: Path) -> None:
    markdown = (report / "report.md").read_text(encoding="utf-8")
    assert "Diverged, and so without a final loss: `moda` (diverged at step 100 of 100" in markdown
    assert "- `moda`: diverged at step 100 of 100" in markdown


def test_the_terminal_gets_a_table_of_80_columns(report: Path) -> None:
    lines = (report / "stdout.txt").read_text().splitlines()
    table = lines[: lines.index("")]
    assert all(len(line) <= 80 for line in lines if "report" not in line)
    gate = table[table.index("m_gate_kv (3 seeds)") + 1]
    assert "-0.0503" in gate
    assert gate.endswith("better")


def test_nothing_to_compare_is_a_mistake_that_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "compare", ("eval.compare.command", ""))
    for seed in (0, 1):
        Recorded(seed=seed).write(tmp_path / "runs" / f"s{seed}")
    Recorded(variant="moda", state="running").write(tmp_path / "runs" / "m")
    assert cli.main(["compare", str(tmp_path / "runs"), "--out", str(tmp_path / "report")]) == 2
    said = capsys.readouterr().err
    assert "left out  m: not finished: running" in said
    assert "nothing to compare" in said
    assert not (tmp_path / "report").exists()


def test_where_to_write_is_checked_before_the_work(
    public: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs given do not exist, which would be found as soon as they are read."""
    monkeypatch.chdir(public)
    Path("file").write_text("x")
    Path("dangling").symlink_to("nowhere")
    Path("taken/report.html").mkdir(parents=True)
    Path("pictured").mkdir()
    Path("pictured/pictures").write_text("x")
    Path("locked").mkdir(mode=0o555)
    Path("comparison").mkdir()  # the default of --out
    Path("comparison").chmod(0o777)
    bad = {
        ("--out", "file"): "file is a file",
        ("--out", "file/x"): "file is a file",
        ("--out", "file/x/y"): "file is a file",
        ("--out", "dangling/x"): "dangling is a file",
        ("--out", "taken"): "taken/report.html is a folder",
        ("--out", "pictured"): "pictured/pictures is a file",
        ("--tensorboard", "file/x"): "file is a file",
        ("--out", "locked"): "locked cannot be written to",
        ("--out", "locked/new/x"): "locked cannot be written to",
        ("--tensorboard", "locked/new"): "locked cannot be written to",
    }
    for (option, folder), why in bad.items():
        if folder.startswith("locked"):
            as_a_user()
        assert cli.main(["compare", "no_such_runs", option, folder]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {option} {folder}: ")
        assert why in said
        assert said.count("\n") == 1
    assert cli.main(["compare", "no_such_runs", "--out", "comparison/fine/x"]) == 2
    assert "no_such_runs does not exist" in capsys.readouterr().err
    assert not Path("comparison/fine").exists()


def test_the_report_may_stand_beside_other_pictures(tmp_path: Path, report: Path) -> None:
    """A folder of pictures that was there before keeps what it held."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "mine.png").write_bytes(b"x")
    write_report(tmp_path, Page("t", []), "{}")
    assert (tmp_path / "pictures" / "mine.png").exists()
