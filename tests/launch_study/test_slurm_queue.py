"""A study in Slurm's queue. Slurm itself is tested with launch/slurm.py; here two scripts answer as it does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.study.slurm_queue import JobList, submit_packed, submit_runs
from launch.study.state import States
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock
from torchtitan_ext.study import Plan

NAMES = ("standard-debug-s0", "control_block-debug-s0", "standard-debug-s1", "control_block-debug-s1")


class Slurm:
    """``sbatch`` gives ids from 101 on and notes its arguments; ``squeue`` says what ``states`` says."""

    def __init__(self, folder: Path) -> None:
        self.submitted = folder / "submitted.txt"
        self.queue = folder / "queue.txt"
        self.submitted.touch()
        self.queue.touch()
        self.script = folder / "train.sbatch"
        self.script.write_text("#!/bin/bash\n")
        programs = {
            "sbatch": f'echo "$@" >> {self.submitted}\necho $((100 + $(wc -l < {self.submitted})))',
            "squeue": f"cat {self.queue}",
        }
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)

    def says(self, states: dict[int, str]) -> None:
        self.queue.write_text("".join(f"{job} {state}\n" for job, state in states.items()))

    def names(self) -> list[str]:
        words = [line.split() for line in self.submitted.read_text().splitlines()]
        return [word.removeprefix("--job-name=") for line in words for word in line if word.startswith("--job-name=")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    return Slurm(folder)


def submit(plan: Plan, slurm: Slurm) -> None:
    submit_runs(plan, script=slurm.script, sbatch_options=["--time=4:00:00"])


def test_each_run_is_submitted_once(
    plan: Callable[..., Plan], slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four = plan()
    submit(four, slurm)
    assert slurm.names() == list(NAMES)
    first = slurm.submitted.read_text().splitlines()[0]
    assert "--nodes=1 --time=4:00:00" in first
    command = four.runs[0].command
    assert command
    assert f"{slurm.script} --config-file {command.config_file} {' '.join(command.overrides)}" in first
    assert JobList(tmp_path / "runs").read() == {name: [str(101 + number)] for number, name in enumerate(NAMES)}

    slurm.says({101: "RUNNING", 102: "PENDING", 103: "REQUEUED", 104: "CONFIGURING"})
    submit(four, slurm)
    assert len(slurm.names()) == 4
    assert f"{NAMES[1]}  queued as job 102" in capsys.readouterr().out


def test_what_ended_or_runs_is_not_submitted_and_what_was_lost_is(
    plan: Callable[..., Plan], leave: Callable[..., RunFolder], slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    four = plan()
    submit(four, slurm)
    leave(NAMES[0], "finished", 40)
    leave(NAMES[1], "diverged", 12)
    lock = RunLock(leave(NAMES[2], "running", 10).path)
    leave(NAMES[3], "running", 20)
    slurm.says({101: "COMPLETED", 102: "FAILED", 104: "NODE_FAIL"})  # 103 is forgotten
    submit(four, slurm)
    lock.release()
    assert slurm.names() == [*NAMES, NAMES[3]]
    printed = capsys.readouterr().out
    assert f"{NAMES[2]}  is being trained by process" in printed
    assert f"{NAMES[3]}  submitted as job 105, from step 20" in printed


def test_no_more_jobs_than_asked_are_left_in_the_queue(
    plan: Callable[..., Plan], slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    four = plan()
    submit_runs(four, script=slurm.script, sbatch_options=[], at_most=2)
    assert slurm.names() == list(NAMES[:2])
    assert f"{NAMES[2]}  is left for later: 2 jobs are in the queue" in capsys.readouterr().out
    slurm.says({101: "COMPLETED", 102: "RUNNING"})
    submit_runs(four, script=slurm.script, sbatch_options=[], at_most=2)
    assert slurm.names() == [*NAMES[:2], NAMES[0]]  # it left no result


def test_ids_of_the_first_format_are_read(plan: Callable[..., Plan], slurm: Slurm, tmp_path: Path) -> None:
    four = plan()
    jobs = {"format": 1, "jobs": {NAMES[0]: [7, 9]}}
    (tmp_path / "runs" / "jobs.json").write_text(json.dumps(jobs))
    slurm.says({9: "PENDING"})
    assert JobList(tmp_path / "runs").live() == {NAMES[0]: ("9", "PENDING")}
    submit(four, slurm)
    assert JobList(tmp_path / "runs").read() == {
        **{name: [str(100 + number)] for number, name in enumerate(NAMES) if number},
        NAMES[0]: ["7", "9"],
    }


def test_a_pack_larger_than_a_node_is_refused(plan: Callable[..., Plan], slurm: Slurm) -> None:
    with pytest.raises(UserError, match="--per-node 9 runs of --nproc 1 are 9 processes, and a node has 8; use"):
        submit_packed(plan(), script=slurm.script, sbatch_options=[], per_node=9)
    assert not slurm.names()


def test_runs_that_wait_for_others_are_submitted_later(
    plan: Callable[..., Plan], slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = plan(controls=[{"wall_clock": "control_block"}], seeds=[0])
    submit(waiting, slurm)
    assert slurm.names() == [run.name for run in waiting.runs[:-1]]
    assert f"{waiting.runs[-1].name}  waits for " in capsys.readouterr().out


def test_queued_runs_are_shown_as_such_and_without_slurm_as_they_are(
    plan: Callable[..., Plan], slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = plan()
    submit(four, slurm)
    slurm.says({101: "PENDING", 102: "TIMEOUT"})
    jobs = JobList(tmp_path / "runs")
    found = States().look(four.runs, frozenset(jobs.others()))
    assert [state.state for state in found.values()] == ["queued", "ready", "ready", "ready"]
    monkeypatch.setenv("PATH", "/nowhere")
    assert jobs.others() == {}
    with pytest.raises(UserError, match="squeue is not on this machine"):
        submit(four, slurm)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 3, "jobs": {}}', '{"format": 1, "jobs": {"a": 3}}'])
def test_a_damaged_list_is_one_clear_line(text: str, plan: Callable[..., Plan], slurm: Slurm, tmp_path: Path) -> None:
    four = plan()
    (tmp_path / "runs" / "jobs.json").write_text(text)
    with pytest.raises(UserError, match=r"jobs\.json is damaged .*; delete it when none of its jobs is queued"):
        submit(four, slurm)
    assert not slurm.names()


def test_the_list_survives_a_crash_between_two_submissions(
    plan: Callable[..., Plan], slurm: Slurm, tmp_path: Path
) -> None:
    four = plan()
    refuse_third = (slurm.script.parent / "sbatch").read_text() + f"[ $(wc -l < {slurm.submitted}) -lt 3 ]\n"
    (slurm.script.parent / "sbatch").write_text(refuse_third)
    with pytest.raises(UserError, match="sbatch refused standard-debug-s1"):
        submit(four, slurm)
    assert json.loads((tmp_path / "runs" / "jobs.json").read_text())["jobs"] == {NAMES[0]: ["101"], NAMES[1]: ["102"]}
