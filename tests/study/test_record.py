"""What a study leaves in its folder, and which folders it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.study import Plan, load_study, plan_study, write_record

GATE = "variants: [standard, m_gate_kv]\nbaseline: standard\ncontrols: [{wall_clock: m_gate_kv}]\n"


def test_the_record_lists_the_runs(plan: Callable[..., Plan]) -> None:
    write_record(plan(GATE))
    record = json.loads(Path("runs/s/study.json").read_text())
    assert (record["format"], record["name"], record["baseline"]) == (1, "s", "standard")
    assert record["runs"][2] == {
        "name": "m_gate_kv_wall_clock-debug-s0",
        "label": "m_gate_kv_wall_clock-debug",
        "variant": "standard",
        "size": "debug",
        "seed": 0,
        "lr": None,
        "control": "wall_clock",
        "baseline": "standard-debug-s0",
    }


@pytest.mark.parametrize("budget", ["match: params", "match: params, by: width", "match: tokens", "tolerance: 0.01"])
def test_the_study_that_is_kept_plans_the_same_runs_from_anywhere(
    budget: str, plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = GATE + f"set: {{data.path: {Path('text').resolve()}}}\nbudget: {{{budget}}}\n"
    text += "stop: {behind: 1, at_step: 5}"
    first = plan(text, "--seeds", "[4]")
    write_record(first)
    kept = Path("runs/s/study.yaml").resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    again = plan_study(load_study(kept), ranks=2)
    assert [run.name for run in again.runs] == [run.name for run in first.runs]
    assert [run.resolved and run.resolved.identity() for run in again.runs] == [
        run.resolved and run.resolved.identity() for run in first.runs
    ]


def test_a_study_may_grow_and_shrink_in_its_folder(plan: Callable[..., Plan], train: Callable[..., None]) -> None:
    small = plan(GATE)
    write_record(small)
    train(small.runs[1], [0.1])
    write_record(plan(GATE + "seeds: [0, 1]"))
    write_record(plan("variants: [standard, moda]\nbaseline: standard"))
    names = [row["name"] for row in json.loads(Path("runs/s/study.json").read_text())["runs"]]
    # What has begun stays on record.
    assert names == ["standard-debug-s0", "moda-debug-s0", "m_gate_kv-debug-s0"]


def test_folders_of_something_else_are_refused(
    plan: Callable[..., Plan], message: Callable[..., str], train: Callable[..., None]
) -> None:
    write_record(plan(GATE))
    assert message(GATE + "name: t\nfolder: runs/s") == (
        "s.yaml:6: runs/s belongs to another study, whose name is 's', not 't'; choose another folder"
    )
    assert message("variants: [{variant: moda, name: m_gate_kv}, standard]\nbaseline: standard") == (
        "s.yaml: runs/s belongs to another study, whose m_gate_kv-debug-s0 has variant 'm_gate_kv', not 'moda'; choose "
        "another folder"
    )
    assert "whose baseline is 'standard', not 'm_gate_kv'" in message(
        "variants: [standard, m_gate_kv]\nbaseline: m_gate_kv"
    )
    train(plan(GATE).runs[0], [0.1])
    assert message(GATE + "set: {model.layers: 3}") == (
        "runs/s/standard-debug-s0 holds another run: model.layers was 4, is 3. Choose another name or folder, or undo "
        "the change"
    )
    assert message(GATE + "folder: runs/s/standard-debug-s0").startswith(
        "s.yaml:5: runs/s/standard-debug-s0 is the folder of a run; choose another folder"
    )
    Path("runs/s/study.json").unlink()
    assert message(GATE) == (
        "s.yaml: runs/s already holds standard-debug-s0, from before this study; choose another folder"
    )
    Path("runs/s/study.json").write_text("{")
    assert message(GATE).startswith("runs/s/study.json is damaged: ")
    Path("runs/s/study.json").write_text('{"format": 2}')
    assert message(GATE).startswith("runs/s/study.json is not a study record of format 1; choose another folder")
    assert message(GATE + "folder: base.yaml").startswith("s.yaml:5: base.yaml is a file; choose another folder")


def test_a_run_that_has_begun_keeps_its_recipe(
    plan: Callable[..., Plan], message: Callable[..., str], train: Callable[..., None]
) -> None:
    first = plan(GATE)
    write_record(first)
    train(first.runs[1], [0.1], state="stopped")
    assert message(GATE + "set: {training.steps: 2000}") == (
        "runs/s/m_gate_kv-debug-s0 was begun with training.steps 1000, and the study now gives 2000; undo the change, "
        "or choose another name or folder for the study"
    )
    assert "was begun with optimizer.weight_decay 0.1, and the study now gives 0.2" in message(
        GATE + "set: {optimizer.weight_decay: 0.2}"
    )
    assert plan(GATE + "set: {checkpoint.every: 10, training.micro_batch: 2, training.compile: true}").runs


def test_the_folder_is_checked_before_it_is_written(plan: Callable[..., Plan]) -> None:
    one, other = plan(GATE), plan(GATE, "--name", "t", "--folder", "runs/s")
    write_record(one)
    with pytest.raises(UserError, match="belongs to another study"):
        write_record(other)
    assert json.loads(Path("runs/s/study.json").read_text())["name"] == "s"
