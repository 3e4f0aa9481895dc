"""What a study does with runs that cannot be started or keep crashing."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.study.runner import Runner
from torchtitan_ext.cli import main as depth
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.study import Plan

FIRST, SECOND = "standard-debug-s0", "control_block-debug-s0"


def test_a_run_that_keeps_crashing_is_given_up_and_the_others_go_on(
    plan: Callable[..., Plan], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A Python that does not find its library crashes for real, and quickly."""
    two = plan(seeds=[0], retries=1)
    broken = {**os.environ, "PYTHONHOME": "/nowhere"}
    assert Runner(two.study, processes=1, places=[broken]).run() == 1
    printed = capsys.readouterr().out
    for name in (FIRST, SECOND):
        assert printed.count(f"{name}  starts") == 2
        assert f"{name}  failed: torchrun left with exit status 1; retry 1 of 1" in printed
        assert f"{name} failed at step 0: torchrun left with exit status 1" in printed
        assert f"{name} failed 2 times; {tmp_path / 'runs' / name / 'logs' / 'console.txt'} has what" in printed
        status = RunFolder(tmp_path / "runs" / name).status()
        assert status is not None
        assert (status["state"], status["step"], status["steps"]) == ("failed", 0, 40)
        console = (tmp_path / "runs" / name / "logs" / "console.txt").read_text()
        assert console.count("PYTHONHOME") >= 2, "both starts are kept"


def test_a_run_whose_folder_holds_something_else_does_not_stop_the_others(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    two = plan(seeds=[0])
    leave(SECOND, "finished", 40)
    (tmp_path / "runs" / FIRST).mkdir()
    (tmp_path / "runs" / FIRST / "thesis.tex").touch()
    assert depth(["study", "run", str(two.study.file), "--nproc", "1"]) == 1
    printed = capsys.readouterr().out
    assert f"{FIRST} cannot be started: {tmp_path / 'runs' / FIRST} holds thesis.tex" in printed
    assert "1 of 2 ended" in printed


def test_a_diverged_run_is_a_result(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    two = plan(seeds=[0])
    leave(FIRST, "finished", 40)
    leave(SECOND, "diverged", 12, "Loss is not finite")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "runs").rglob("*") if file.parent.name == SECOND}
    assert depth(["study", "run", str(two.study.file), "--nproc", "1"]) == 0
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert "2 of 2 ended" in capsys.readouterr().out


def test_watching_ends_when_the_runs_have_ended(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    two = plan(seeds=[0])
    leave(FIRST, "finished", 40)
    leave(SECOND, "diverged", 12, "Loss is not finite")
    assert depth(["study", "status", str(two.study.file), "--nproc", "1", "--watch"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2 of 2 ended") == 1
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sbatch=--nodes=2"], "--sbatch is for Slurm; give --slurm SCRIPT too"),
        (["--slurm", "launch/slurm/train_b200.sbatch"], "say with --nproc how many processes a run has"),
        (["--slurm", "none.sbatch", "--nproc", "2"], "--slurm none.sbatch: no such file"),
        (["--sedes", "[0]"], "--sedes is not a key of a study; did you mean 'seeds'?"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, plan: Callable[..., Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    two = plan(seeds=[0])
    assert depth(["study", "run", str(two.study.file), *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out
