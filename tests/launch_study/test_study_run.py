"""A study run for real: stopped with Ctrl-C, a run crashed, everything killed, and in the end what an undisturbed study
gives."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from torchtitan_ext.cli import main as depth
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import holder_of
from torchtitan_ext.study import load_study, plan_study, write_record

pytestmark = pytest.mark.slow

STEPS = 20
TIMEOUT = 300
"""Seconds after which something counts as hung."""
NAMES = ("standard-debug-s0", "control_block-debug-s0", "standard-debug-s1", "control_block-debug-s1")
MANY_RUNS = Path(__file__).parent.parent / "end_to_end" / "many_runs.py"


def wait_until(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "hung"
        assert process is None or process.poll() is None, "ended too early"
        time.sleep(0.02)


class Study:
    """A study file and its folder; starts ``depth study run`` in processes."""

    def __init__(self, base: Path, name: str, **keys: object) -> None:
        self.file = base.parent / f"{name}.yaml"
        self.folder = base.parent / "studies" / name
        study = {"base": base.name, "folder": str(self.folder), "baseline": "standard", **keys}
        self.file.write_text(yaml.safe_dump(study))
        self.started: list[subprocess.Popen] = []
        self.began = 0.0

    def run_folder(self, name: str) -> RunFolder:
        return RunFolder(self.folder / name)

    def step(self, name: str) -> int:
        """The step that a run has reached in its present start; 0 while it is not training."""
        status = self.run_folder(name).status()
        return status["step"] if status and status["time"] >= self.began and holder_of(self.folder / name) else 0

    def pause(self, steps: dict[str, int], process: subprocess.Popen) -> dict[str, int]:
        """Hold each run's process where it is, as soon as it has reached its step; returns their ids."""
        paused: dict[str, int] = {}

        def pause_those_that_are_there() -> bool:
            for name in steps.keys() - paused.keys():
                holder = holder_of(self.folder / name)
                if self.step(name) >= steps[name] and holder is not None and holder.pid > 0:
                    os.kill(holder.pid, signal.SIGSTOP)
                    paused[name] = holder.pid
            return paused.keys() == steps.keys()

        wait_until(pause_those_that_are_there, process)
        return paused

    def state(self, name: str) -> tuple[str, int]:
        status = self.run_folder(name).status()
        return (status["state"], status["step"]) if status else ("", 0)

    def start(self, log: Path, *options: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "torchtitan_ext.cli", "study", "run", str(self.file), "--nproc", "1", *options]
        with open(log, "w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
            )
        self.started.append(process)
        self.began = time.time()
        return process

    def train_undisturbed(self, ranks: int) -> None:
        """All runs, one after another, by processes that import torch once."""
        plan = plan_study(load_study(self.file), ranks)
        write_record(plan)
        overrides = {str(run.folder): list(run.command.overrides) for run in plan.runs if run.command}
        runs = self.file.with_suffix(".json")
        runs.write_text(json.dumps(overrides))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*command, str(MANY_RUNS), str(self.file.parent / "debug.yaml"), str(runs)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def base(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studies") / "debug.yaml"
    run = {
        "model": {"size": "debug"},
        "data": {"path": str(dataset), "seq_len": 64},
        "training": {"steps": STEPS, "batch_tokens": 512, "micro_batch": 2},
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every": 5},
        "heldout": {"every": 10, "tokens": 4096},
        "logging": {"every": 1},
    }
    path.write_text(yaml.safe_dump(run))
    return path


@dataclass
class Disturbed:
    """What was seen while the study went through its troubles."""

    study: Study
    after_ctrl_c: dict[str, tuple[str, int]]
    exit_after_ctrl_c: int
    refusal: tuple[int, str]
    after_kill: str
    finished_before: dict[Path, tuple[int, int]]
    finished_after: dict[Path, tuple[int, int]]
    logs: list[str]
    exit_statuses: tuple[int, int]


def files_of(study: Study, names: list[str]) -> dict[Path, tuple[int, int]]:
    """The files of runs, each with its inode and the time of its last change in nanoseconds."""
    files = [file for name in names for file in (study.folder / name).rglob("*") if file.is_file()]
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


def kill_all(process: subprocess.Popen) -> None:
    """End a process and all that it has started, the last first, so that nobody notices and saves."""
    for started in reversed(psutil.Process(process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            started.kill()
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def disturbed(base: Path) -> Iterator[Disturbed]:
    study = Study(base, "disturbed", variants=["standard", "control_block"], seeds=[0, 1], retries=1)
    try:
        yield go_through_troubles(base, study)
    finally:
        for process in study.started:
            if process.poll() is None:
                kill_all(process)


def go_through_troubles(base: Path, study: Study) -> Disturbed:
    logs = [base.parent / f"disturbed-{number}.log" for number in range(4)]

    # Two runs at a time, until Ctrl-C.
    process = study.start(logs[0], "--jobs", "2")
    paused = study.pause({name: 3 for name in NAMES[:2]}, process)
    process.send_signal(signal.SIGINT)
    for pid in paused.values():
        os.kill(pid, signal.SIGCONT)
    exit_after_ctrl_c = process.wait(TIMEOUT)
    after_ctrl_c = {name: study.state(name) for name in NAMES}

    # The first run's process dies, as by the system's out-of-memory killer, and is tried again. Then everything dies.
    process = study.start(logs[1], "--jobs", "2")
    paused = study.pause({name: after_ctrl_c[name][1] + 1 for name in NAMES[:2]}, process)
    refusal = start_beside(base, study)
    os.kill(paused[NAMES[0]], signal.SIGKILL)
    os.kill(paused[NAMES[1]], signal.SIGCONT)
    study.pause({NAMES[2]: 3}, process)
    wait_until(lambda: all(study.state(name)[0] == "finished" for name in NAMES[:2]), process)
    kill_all(process)
    after_kill = table_of(study)
    finished = [name for name in NAMES if study.state(name)[0] == "finished"]
    before = files_of(study, finished)

    # The same command again, by two people.
    process = study.start(logs[2], "--jobs", "2")
    paused = study.pause({name: 1 for name in NAMES if name not in finished}, process)
    second = study.start(logs[3])
    wait_until(lambda: "waiting for it" in logs[3].read_text(), second)
    for pid in paused.values():
        os.kill(pid, signal.SIGCONT)
    exit_statuses = process.wait(TIMEOUT), second.wait(TIMEOUT)
    return Disturbed(
        study,
        after_ctrl_c,
        exit_after_ctrl_c,
        refusal,
        after_kill,
        before,
        files_of(study, finished),
        [log.read_text() for log in logs],
        exit_statuses,
    )


def start_beside(base: Path, study: Study) -> tuple[int, str]:
    """Start a run with `depth train` that the study is training: its exit status and what it says."""
    run = next(run for run in plan_study(load_study(study.file), 1).runs if run.name == NAMES[0])
    assert run.command
    command = [sys.executable, "-m", "torchtitan_ext.cli", "train", str(base), "--nproc", "1", *run.command.overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    return done.returncode, done.stderr


def table_of(study: Study) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert depth(["study", "status", str(study.file), "--nproc", "1"]) == 0
    return shown.getvalue()


@pytest.fixture(scope="module")
def undisturbed(base: Path) -> Study:
    """The same study, with a third entry that hardly learns, which the stopping rule is to end at step 10."""
    slow = {"name": "slow", "variant": "standard", "set": {"optimizer.lr": 1e-6}}
    study = Study(
        base,
        "undisturbed",
        variants=["standard", "control_block", slow],
        seeds=[0, 1],
        exclude=[{"variant": "slow", "seed": 1}],
        stop={"behind": 0.2, "at_step": 10},
    )
    study.train_undisturbed(ranks=2)
    return study


def test_ctrl_c_saves_what_runs(disturbed: Disturbed) -> None:
    assert disturbed.exit_after_ctrl_c == 130
    for name in NAMES[:2]:
        state, step = disturbed.after_ctrl_c[name]
        assert state == "stopped"
        assert 3 <= step < STEPS
    assert [disturbed.after_ctrl_c[name] for name in NAMES[2:]] == [("", 0), ("", 0)]


def test_what_was_saved_is_where_the_next_start_goes_on(disturbed: Disturbed) -> None:
    for name in NAMES[:2]:
        console = (disturbed.study.folder / name / "logs" / "console.txt").read_text()
        assert f"Training starts at step {disturbed.after_ctrl_c[name][1] + 1}\n" in console


def test_a_run_that_is_being_trained_is_refused(disturbed: Disturbed) -> None:
    status, message = disturbed.refusal
    assert status == 2
    assert message.startswith("error: ")
    assert "is being trained by process" in message
    assert message.count("\n") == 1


def test_a_crashed_run_is_tried_again(disturbed: Disturbed) -> None:
    assert f"{NAMES[0]}  failed: " in disturbed.logs[1]
    assert "; retry 1 of 1" in disturbed.logs[1]


def test_after_everything_was_killed_the_table_shows_it(disturbed: Disturbed) -> None:
    lines = disturbed.after_kill.splitlines()
    states = dict(zip(NAMES, (line.split()[1] for line in lines[1:]), strict=False))
    assert states[NAMES[0]] == states[NAMES[1]] == "finished"
    assert states[NAMES[2]] == "interrupted"
    assert all(len(line) <= 80 for line in lines)


def test_runs_that_had_finished_are_left_alone(disturbed: Disturbed) -> None:
    assert len({file.parts[-2] for file in disturbed.finished_before if file.name == "status.json"}) == 2
    assert disturbed.finished_after == disturbed.finished_before


def test_two_people_share_one_study(disturbed: Disturbed) -> None:
    """The second starts none of the runs that the first trains, waits for them, and is done when they are."""
    assert disturbed.exit_statuses == (0, 0)
    assert f"{NAMES[2]}  resumes" in disturbed.logs[2]
    assert " starts" not in disturbed.logs[3]
    assert " resumes" not in disturbed.logs[3]
    for log in disturbed.logs[2:]:
        assert "4 of 4 ended" in log


def test_in_the_end_it_is_the_undisturbed_study(disturbed: Disturbed, undisturbed: Study) -> None:
    """Losses on other numbers of ranks differ by rounding alone."""
    for name in NAMES:
        assert disturbed.study.state(name) == undisturbed.state(name) == ("finished", STEPS)
        for tag in ("loss_metrics/global_avg_loss", "heldout/loss"):
            ours = {
                record["step"]: record[tag] for record in disturbed.study.run_folder(name).metrics() if tag in record
            }
            theirs = {record["step"]: record[tag] for record in undisturbed.run_folder(name).metrics() if tag in record}
            assert ours == pytest.approx(theirs, abs=1e-4), (name, tag)


def differences(study: Study, variant: str, baseline: str) -> list[int]:
    """Check each comparison that the variant logged against both runs' losses; returns their steps."""
    tag = "loss_metrics/global_avg_loss"
    losses = [
        {record["step"]: record[tag] for record in study.run_folder(name).metrics() if tag in record}
        for name in (variant, baseline)
    ]
    compared = [record for record in study.run_folder(variant).metrics() if "vs_baseline/loss" in record]
    for record in compared:
        step = record["step"]
        assert record["vs_baseline/loss"] == pytest.approx(losses[0][step] - losses[1][step], abs=1e-9)
    return [record["step"] for record in compared]


def test_each_step_is_compared_with_the_baselines(disturbed: Disturbed, undisturbed: Study) -> None:
    """All steps where the baseline had run before; else those that it reached in time. Never a step twice."""
    for variant, baseline in ((NAMES[1], NAMES[0]), (NAMES[3], NAMES[2])):
        assert differences(undisturbed, variant, baseline) == list(range(1, STEPS + 1))
        steps = differences(disturbed.study, variant, baseline)
        assert steps
        assert steps == sorted(set(steps))
    assert not [r for r in undisturbed.run_folder(NAMES[0]).metrics() if "vs_baseline/loss" in r]


def test_tensorboard_shows_the_comparison(disturbed: Disturbed) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = disturbed.study.run_folder(NAMES[1])
    events = EventAccumulator(str(folder.tensorboard_path), size_guidance={"scalars": 0}).Reload()
    for tag in ("vs_baseline/loss", "vs_baseline/tokens_per_s", "vs_baseline/peak_memory"):
        recorded = {record["step"]: record[tag] for record in folder.metrics() if tag in record}
        assert [event.step for event in events.Scalars(tag)] == list(recorded)
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(list(recorded.values()), rel=1e-5)


def test_the_stopping_rule_ends_all_ranks_and_is_recorded(undisturbed: Study) -> None:
    folder = undisturbed.run_folder("slow-debug-s0")
    status = folder.status()
    assert status is not None
    assert (status["state"], status["step"]) == ("diverged", 10)
    compared = {
        record["step"]: record["vs_baseline/loss"] for record in folder.metrics() if "vs_baseline/loss" in record
    }
    assert compared[10] > 0.2
    assert f"loss {compared[10]:.4f} above that of" in status["reason"]
    assert (folder.checkpoint_path / "step-10").is_dir()


def test_a_study_whose_runs_have_ended_starts_nothing(undisturbed: Study, capsys: pytest.CaptureFixture[str]) -> None:
    names = [*NAMES, "slow-debug-s0"]
    before = files_of(undisturbed, names)
    assert depth(["study", "run", str(undisturbed.file), "--nproc", "2"]) == 0
    assert files_of(undisturbed, names) == before
    printed = capsys.readouterr().out
    assert "slow-debug-s0 diverged at step 10: loss" in printed
    assert "5 of 5 ended" in printed
