"""The first screen of a report: the forest plot, variants by size, where the runs come from."""

import csv
import io
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from eval.compare.compare import compare
from eval.compare.forest import forest_picture
from eval.compare.grouping import make_families
from eval.compare.numbers import size_order
from eval.compare.page import Table, tables_of
from eval.compare.page_tables import to_csv, to_latex
from eval.compare.results import FamilyResult, Results
from eval.compare.sections import report
from eval.compare.sections.first import first_blocks
from eval.compare.sources import gather
from torchtitan_ext.run_folder import RunFolder

from .conftest import Recorded, straight

NOISE = {0: 0.0, 2: 0.003, 10: -0.004}
CODE = """started   2026-11-{day} 20:31:46 UTC on node{day}
hardware  8 processes, NVIDIA B200
command   train.py --config-file x.yaml
revision  {revision}
versions  python 3.11.7, torch 2.14.1

"""


def results(runs: Path) -> Results:
    gathered = gather([str(runs)])
    return compare(make_families(gathered.runs, gathered.left_out), gathered.left_out)


@pytest.fixture
def study(runs: Path) -> Path:
    """Two sizes and three seeds, whose order by name is not that by number; one variant is better, one worse, and of
    one nothing is known."""
    for size in ("10M", "1.2M"):
        for seed, noise in NOISE.items():
            Recorded(straight(8, 4.0), size=size, seed=seed).write(runs / f"s{size}-{seed}")
            for variant, end, step, memory in (
                ("worse", 4.1 - noise, 0.4, 1.0),
                ("unknown", 4.0 + noise, 0.5, 2.0),
                ("a_better", 3.9 + 2 * noise, 0.625, 3.0),
            ):
                path = runs / f"{variant}{size}-{seed}"
                Recorded(
                    straight(8, end), variant=variant, size=size, seed=seed, step_seconds=step, memory=memory
                ).write(path)
    return runs


def svg(family: FamilyResult) -> ElementTree.Element:
    picture = forest_picture(family)
    assert picture is not None
    return ElementTree.fromstring(picture)


def named(element: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return list(element.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def test_sizes_and_seeds_are_in_order_of_number(study: Path) -> None:
    found = results(study)
    assert [family.size for family in found.families] == ["1.2M", "10M"]
    assert {tuple(group.seeds) for family in found.families for group in family.groups} == {(0, 2, 10)}
    assert sorted(["1B", "debug", "350M", "1.2M", "10M", "120k", "1.5B"], key=size_order) == (
        ["120k", "1.2M", "10M", "350M", "1B", "1.5B", "debug"]
    )


def test_rows_are_in_the_order_of_their_verdicts_everywhere(study: Path) -> None:
    found = results(study)
    order = ["standard", "a_better", "unknown", "worse"]
    for family in found.families:
        assert [group.label for group in family.in_order] == order
        assert [group.verdict for group in family.in_order] == ["", "better", "cannot tell", "worse"]
    tables = tables_of(report(found).blocks)
    for file in ("1.2M-final-loss", "10M-final-loss", "10M-cost"):
        assert [row[0] for row in tables[file].rows] == [f"`{label}`" for label in order]
    assert tables["10M-final-loss"].columns[:3] == ["run", "verdict", "difference"]
    assert [row[1].split(" (")[0] for row in tables["10M-final-loss"].rows] == (
        ["baseline", "better", "cannot tell", "worse"]
    )


def test_the_forest_plot_shows_intervals_at_their_place_beside_costs(study: Path) -> None:
    family = results(study).families[0]
    picture = svg(family)
    texts = ["".join(text.itertext()).replace("−", "-") for text in named(picture, "text")]
    rows = [text for text in texts if re.match(r"\w+: ", text)]
    assert rows == ["a_better: better", "unknown: cannot tell", "worse: worse"]
    # Steps of 0.625, 0.5 and 0.4 s against 0.5 s; 3, 2 and 1 GiB against 2.
    assert [text for text in texts if text.endswith("×")] == ["0.80×", "1.50×", "1.00×", "1.00×", "1.25×", "0.50×"]
    ticks = [group for group in named(picture, "g") if re.fullmatch(r"xtick_\d+", group.get("id", ""))]
    places = [float(named(tick, "use")[0].get("x", "")) for tick in ticks]
    values = [float("".join(named(tick, "text")[0].itertext()).replace("−", "-")) for tick in ticks]
    per_point = (values[-1] - values[0]) / (places[-1] - places[0])
    drawn = []
    for path in named(picture, "path"):
        ends = re.fullmatch(r"M ([\d.]+) ([\d.]+)\s+L ([\d.]+) ([\d.]+)\s*", path.get("d", ""))
        if ends and ends[2] == ends[4] and path.get("style", "").endswith("stroke-width: 2"):
            drawn.append([values[0] + (float(at) - places[0]) * per_point for at in (ends[1], ends[3])])
    judged = [group.difference for group in family.in_order if group.difference]
    assert len(drawn) == len(judged) == 3
    for (low, high), difference in zip(drawn, judged, strict=True):
        assert (low, high) == pytest.approx((difference.low, difference.high), abs=1e-4)


def markers(picture: ElementTree.Element) -> int:
    """Those of the rows: one for each difference, and one for each open end."""
    ticks = [use for group in named(picture, "g") if "tick" in group.get("id", "") for use in named(group, "use")]
    return len(set(named(picture, "use")) - set(ticks))


def test_an_open_end_is_an_arrow(study: Path) -> None:
    assert markers(svg(results(study).families[0])) == 3
    for path in study.glob("a_better*-2"):
        RunFolder(path).write_status("diverged", 40, 100, "loss is nan")
    family = results(study).families[0]
    row = next(group for group in family.groups if group.label == "a_better")
    assert row.difference is not None
    assert row.difference.high == math.inf
    picture = svg(family)
    assert "a_better: cannot tell, but…" in ["".join(text.itertext()) for text in named(picture, "text")]
    assert markers(picture) == 4


def test_variants_by_size_are_one_table(study: Path) -> None:
    table = tables_of(first_blocks(results(study)))["variants-by-size"]
    assert list(table.columns) == ["run", "`1.2M`", "`10M`"]
    # The mean of the noise is −0.001/3.
    assert list(map(list, table.rows)) == [
        ["`a_better`", "better -0.1007", "better -0.1007"],
        ["`unknown`", "cannot tell -0.0003", "cannot tell -0.0003"],
        ["`worse`", "worse +0.1003", "worse +0.1003"],
    ]


def test_where_the_runs_come_from(runs: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    changed = {"training": {"batch_tokens": 65536, "precision": "bf16"}}
    for variant, seed in (("standard", 0), ("moda", 0), ("moda", 1)):
        path = Recorded(variant=variant, seed=seed, run_file=changed).write(runs / f"{variant}-{seed}")
        revision = commit if variant == "standard" else f"{commit} with uncommitted changes"
        RunFolder(path).append_code(CODE.format(day=28 + seed, revision=revision))
    (row,) = results(runs).families
    assert row.provenance == {
        "study": [],
        "date": ["2026-11-28", "2026-11-29"],
        "revision": ["0123456789ab", "0123456789ab with uncommitted changes"],
        "hardware": ["8 processes, NVIDIA B200"],
        "machine": ["node28", "node29"],
        "software": ["python 3.11.7, torch 2.14.1"],
        "data": ["nowhere", "fingerprint aaaa"],
        "batch": ["65,536 tokens"],
        "learning rate": ["0.001"],
        "length": ["100 steps"],
        "precision": ["bf16"],
        "training time": ["2.5 min in 3 runs"],
    }
    table = tables_of(first_blocks(results(runs)))["provenance"]
    assert ["study", "`not recorded`"] in list(map(list, table.rows))


def test_a_table_becomes_csv_and_latex() -> None:
    table = Table("t", ["run", "95% interval"], [["`a_b&c`", "-0.1 to +0.2"], ["**x**, “y”", "1.2× | < 3"]])
    assert list(csv.reader(io.StringIO(to_csv(table)))) == [
        ["run", "95% interval"],
        ["a_b&c", "-0.1 to +0.2"],
        ["x, “y”", "1.2× | < 3"],
    ]
    assert to_latex(table).splitlines() == [
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"run & 95\% interval \\",
        r"\midrule",
        r"a\_b\&c & $-$0.1 to +0.2 \\",
        r"x, ``y'' & 1.2$\times$ \textbar{} \textless{} 3 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


def test_tables_of_one_name_have_files_of_their_own() -> None:
    blocks = [Table("t", ["a"], []), Table("t", ["b"], []), Table("t", ["c"], [])]
    assert {file: table.columns for file, table in tables_of(blocks).items()} == {
        "t": ["a"],
        "t-2": ["b"],
        "t-3": ["c"],
    }
