"""Giving a run up by hand: it is not started, not waited for, and counts as lost in a report."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eval.compare.sources import gather
from launch.study.state import States
from torchtitan_ext.cli import main as depth
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_file import dump_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock
from torchtitan_ext.study import Plan, plan_study
from torchtitan_ext.study.dropped import drop_run, dropped_runs

BASE, VARIANT = "standard-debug-s0", "control_block-debug-s0"


def state_of(plan: Plan, name: str) -> str:
    return States().look(plan.runs)[name].state


def test_a_dropped_run_is_not_started_and_can_be_taken_back(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    two = plan(seeds=[0])
    file = str(two.study.file)
    leave(BASE, "finished", 40)
    leave(VARIANT, "stopped", 12)
    assert depth(["study", "drop", file, VARIANT, "--reason", "stuck above 9 nats", "--nproc", "1"]) == 0
    assert "is dropped at step 12: stuck above 9 nats" in capsys.readouterr().out
    assert state_of(two, VARIANT) == "dropped"
    # Nothing is left to run: this returns at once, without starting a process.
    assert depth(["study", "run", file, "--nproc", "1"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 ended" in printed
    assert f"{VARIANT} was dropped at step 12: stuck above 9 nats" in printed
    assert not (two.run(VARIANT).folder / "logs").exists()

    assert depth(["study", "drop", file, VARIANT, "--undo", "--nproc", "1"]) == 0
    assert state_of(two, VARIANT) == "stopped"
    assert depth(["study", "drop", file, VARIANT, "--undo", "--nproc", "1"]) == 2
    assert "was not dropped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("state", "name", "message"),
    [
        ("finished", VARIANT, f"{VARIANT} is finished at step 12; only runs without a result can be dropped"),
        ("diverged", VARIANT, f"{VARIANT} is diverged at step 12; only runs without a result can be dropped"),
        ("stopped", "control_blok-debug-s0", f"is not a run of study; did you mean '{VARIANT}'?"),
    ],
)
def test_what_cannot_be_dropped(
    state: str,
    name: str,
    message: str,
    plan: Callable[..., Plan],
    leave: Callable[..., RunFolder],
    capsys: pytest.CaptureFixture[str],
) -> None:
    two = plan(seeds=[0])
    leave(VARIANT, state, 12, steps=12)
    if state == "finished":
        two = plan(seeds=[0], set={"training.steps": 12})
    assert depth(["study", "drop", str(two.study.file), name, "--nproc", "1"]) == 2
    assert message in capsys.readouterr().err
    assert dropped_runs(two.study.folder) == {}


def test_a_run_that_is_being_trained_here_is_stopped_first(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    two = plan(seeds=[0])
    lock = RunLock(leave(VARIANT, "running", 12).path)
    assert depth(["study", "drop", str(two.study.file), VARIANT, "--nproc", "1"]) == 2
    lock.release()
    assert f"{VARIANT} is being trained by process" in capsys.readouterr().err


def test_wall_clock_controls_do_not_wait_for_dropped_seeds(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder]
) -> None:
    four = plan(controls=[{"wall_clock": "control_block"}])
    for run in four.runs[:3]:
        folder = leave(run.name, "finished", 40)
        assert run.command
        folder.write_facts(run.command.resolved.facts())
        folder.write_run(dump_run(run.command.resolved.run))
    control = four.runs[-1].name
    assert plan_study(four.study, 1).run(control).command is None
    drop_run(four.study.folder, four.runs[3].name, "hopeless")
    again = plan_study(four.study, 1)
    assert again.run(control).command is not None
    assert four.runs[3].name not in again.run(control).after


def test_a_report_counts_it_as_lost_with_the_reason(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder], tmp_path: Path
) -> None:
    four = plan()
    leave(VARIANT, "stopped", 12)
    drop_run(four.study.folder, VARIANT, "stuck above 9 nats")
    out = {left.name: (left.fate, left.why) for left in gather([str(four.study.folder)]).left_out}
    assert out[VARIANT] == ("failed", "dropped by hand: stuck above 9 nats")
    assert out["control_block-debug-s1"][0] == "unfinished"


@pytest.mark.parametrize("text", ["[]", "{", '{"format": 2, "runs": {}}', '{"format": 1, "runs": {"a": 3}}'])
def test_a_damaged_record_is_one_clear_line(text: str, plan: Callable[..., Plan]) -> None:
    two = plan(seeds=[0])
    (two.study.folder / "dropped.json").write_text(text)
    with pytest.raises(UserError, match=r"dropped\.json is damaged .*; delete it"):
        States().look(two.runs)


def test_the_record_survives_other_drops(plan: Callable[..., Plan]) -> None:
    folder = plan().study.folder
    drop_run(folder, "a", "one")
    drop_run(folder, "b", "two")
    drop_run(folder, "a", "three")
    assert dropped_runs(folder) == {"a": "three", "b": "two"}
    assert json.loads((folder / "dropped.json").read_text())["format"] == 1
