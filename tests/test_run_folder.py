"""The run folder as others find it, also after a crash."""

import json
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import FORMAT, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_metrics_come_back_as_logged(folder: RunFolder) -> None:
    folder.append_metrics(1, {"loss": 2.5})
    folder.append_metrics(2, {"loss": 2.25, "lr": 1e-3})
    records = list(folder.metrics())
    assert [(record["step"], record["loss"]) for record in records] == [(1, 2.5), (2, 2.25)]
    assert records[1]["lr"] == 1e-3
    assert all(record["time"] > 1.7e9 for record in records)


def test_a_line_cut_off_by_a_crash_is_left_out_and_removed(folder: RunFolder) -> None:
    for step in (1, 2, 3):
        folder.append_metrics(step, {"loss": 1.0})
    whole = folder.metrics_path.read_text()
    folder.metrics_path.write_text(whole + '{"step": 4, "lo')
    assert [record["step"] for record in folder.metrics()] == [1, 2, 3]
    folder.cut_metrics(2)
    folder.append_metrics(3, {"loss": 0.5})
    assert [(record["step"], record["loss"]) for record in folder.metrics()] == [(1, 1.0), (2, 1.0), (3, 0.5)]


def test_damage_in_the_middle_names_the_line(folder: RunFolder) -> None:
    folder.append_metrics(1, {"loss": 1.0})
    folder.metrics_path.write_text(folder.metrics_path.read_text() + "nonsense\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a JSON object"):
        list(folder.metrics())


def test_status_and_facts_carry_the_format(folder: RunFolder) -> None:
    assert folder.status() is None
    folder.write_status("running", 3, 10)
    status = folder.status()
    assert status is not None
    assert (status["state"], status["step"], status["steps"], status["format"]) == ("running", 3, 10, FORMAT)
    assert not folder.exists
    folder.write_facts({"parameters": 7})
    assert folder.exists
    assert folder.facts()["parameters"] == 7
    assert not [path for path in folder.path.iterdir() if path.name.endswith(".tmp")]


def test_another_format_is_refused(folder: RunFolder) -> None:
    (folder.path / "facts.json").write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(UserError, match=f"format {FORMAT + 1}, this version reads the formats up to {FORMAT}"):
        folder.facts()


def test_missing_and_damaged_files_are_named(folder: RunFolder) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: it has no facts\.json"):
        folder.facts()
    (folder.path / "facts.json").write_text('{"format": 1')
    with pytest.raises(UserError, match=r"facts\.json is damaged"):
        folder.facts()


def test_a_folder_with_strangers_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"holds thesis\.tex, which is no run's"):
        RunFolder(tmp_path).create()
    with pytest.raises(UserError, match="is a file"):
        RunFolder(tmp_path / "thesis.tex").create()


def test_what_a_first_start_left_half_written_does_not_bar_the_next(folder: RunFolder) -> None:
    for name in (".run.yaml.tmp", ".facts.json.tmp"):
        (folder.path / name).write_text("")
    folder.create()
    (folder.path / ".thesis.tex.tmp").write_text("")
    with pytest.raises(UserError, match=r"holds \.thesis\.tex\.tmp"):
        folder.create()


def test_the_status_remembers_which_step_was_saved(folder: RunFolder) -> None:
    folder.note_saved(3)
    assert folder.status() is None, "there is no run yet"
    folder.write_status("running", 4, 10)
    folder.note_saved(4)
    folder.write_status("failed", 6, 10, "reason")
    status = folder.status()
    assert status is not None
    assert (status["state"], status["step"], status["saved"], status["reason"]) == ("failed", 6, 4, "reason")
    (folder.path / "status.json").write_text("{")
    assert folder.readable_status() == {}
    folder.write_status("running", 7, 10)
    assert "saved" not in folder.readable_status()
