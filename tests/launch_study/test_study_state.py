"""How a study stands, read from its folders, and the table that shows it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.study.job import places
from launch.study.state import RunState, States
from launch.study.table import status_table
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock
from torchtitan_ext.study import Plan

MakePlan = Callable[..., Plan]
Leave = Callable[..., RunFolder]


def states(plan: Plan, queued: frozenset[str] = frozenset()) -> dict[str, tuple[str, int, int | None]]:
    found = States().look(plan.runs, queued)
    assert list(found) == [run.name for run in plan.runs]
    return {name: (state.state, state.step, state.steps) for name, state in found.items()}


def test_states_of_runs(plan: MakePlan, leave: Leave) -> None:
    four = plan()
    assert set(states(four).values()) == {("ready", 0, 40)}
    leave("standard-debug-s0", "finished", 40)
    leave("control_block-debug-s0", "diverged", 12)
    leave("standard-debug-s1", "failed", 7)
    leave("control_block-debug-s1", "stopped", 30)
    assert list(states(four).values()) == [
        ("finished", 40, 40),
        ("diverged", 12, 40),
        ("failed", 7, 40),
        ("stopped", 30, 40),
    ]


def test_running_means_that_a_process_is_there(plan: MakePlan, leave: Leave) -> None:
    four = plan()
    folder = leave("standard-debug-s0", "running", 20)
    assert states(four)["standard-debug-s0"] == ("interrupted", 20, 40)
    lock = RunLock(folder.path)
    assert states(four)["standard-debug-s0"] == ("running", 20, 40)
    lock.release()
    assert states(four)["standard-debug-s0"] == ("interrupted", 20, 40)


def test_a_run_that_has_just_been_started_has_no_status_yet(plan: MakePlan, tmp_path: Path) -> None:
    four = plan()
    (tmp_path / "runs" / "standard-debug-s0").mkdir()
    lock = RunLock(tmp_path / "runs" / "standard-debug-s0")
    assert states(four)["standard-debug-s0"] == ("running", 0, 40)
    lock.release()


def test_a_finished_run_that_is_to_be_longer_goes_on(plan: MakePlan, leave: Leave) -> None:
    four = plan()
    leave("standard-debug-s0", "finished", 40)
    longer = plan(set={"training.steps": 60})
    assert states(four)["standard-debug-s0"] == ("finished", 40, 40)
    assert states(longer)["standard-debug-s0"] == ("interrupted", 40, 60)


def test_a_queued_job_counts_until_it_runs(plan: MakePlan, leave: Leave) -> None:
    four = plan()
    leave("standard-debug-s0", "finished", 40)
    leave("control_block-debug-s0", "stopped", 7)
    queued = frozenset(["standard-debug-s0", "control_block-debug-s0", "standard-debug-s1"])
    assert [state for state, _, _ in states(four, queued).values()] == ["finished", "queued", "queued", "ready"]


def test_a_wall_clock_control_waits_for_all_the_runs_it_is_measured_on(plan: MakePlan, leave: Leave) -> None:
    waiting = plan(controls=[{"wall_clock": "control_block"}], seeds=[0])
    last = waiting.runs[-1]
    assert set(last.after) == {"standard-debug-s0", "control_block-debug-s0"}
    assert states(waiting)[last.name] == ("waiting", 0, None)
    leave("standard-debug-s0", "finished", 40)
    leave("control_block-debug-s0", "running", 12)
    assert states(waiting)[last.name] == ("waiting", 0, None)
    leave("control_block-debug-s0", "finished", 40)
    assert states(waiting)[last.name] == ("ready", 0, None)


def test_the_table(plan: MakePlan, leave: Leave) -> None:
    four = plan()
    leave("standard-debug-s0", "finished", 40)
    folder = leave("control_block-debug-s0", "running", 10)
    leave("standard-debug-s1", "diverged", 12, "Loss is not finite (nan) at step 12. Stopping training.\nmore")
    lock = RunLock(folder.path)
    found = States().look(four.runs)
    lock.release()
    lines = status_table(found.values()).splitlines()
    assert lines[0].split() == ["run", "state", "step", "loss", "held", "out", "tok/s", "GiB", "left", "vs", "base"]
    assert lines[1].split() == ["standard-debug-s0", "finished", "40/40", "3.250", "3.500", "12.3k", "1.5", "-0.125"]
    # 30 steps of 2 s are left
    numbers = ["10/40", "3.250", "3.500", "12.3k", "1.5", "1m00s", "-0.125"]
    assert lines[2].split() == ["control_block-debug-s0", "running", *numbers]
    assert lines[4].split() == ["control_block-debug-s1", "ready", "0/40"]
    assert lines[6].startswith("2 of 4 ended; ")
    assert lines[7] == "standard-debug-s1 diverged at step 12: Loss is not finite (nan) at step 12. Stopping training."


def test_the_table_shows_the_queue_the_disk_and_what_looks_hopeless(plan: MakePlan, leave: Leave) -> None:
    four = plan()
    behind = {"vs_baseline/loss": 0.8}
    leave("standard-debug-s0", "stopped", 30).append_metrics(30, behind)
    leave("control_block-debug-s0", "stopped", 3).append_metrics(3, behind)  # too early to be judged
    leave("standard-debug-s1", "finished", 40).append_metrics(40, behind)  # a result
    jobs = {"control_block-debug-s0": ("7_0", "RUNNING"), "control_block-debug-s1": ("7_0", "RUNNING")}
    text = status_table(States().look(four.runs).values(), {**jobs, "standard-debug-s0": ("9", "PENDING")}, 1_234_567)
    assert "; 1.23MB of checkpoints\n" in text
    assert "jobs in Slurm's queue: 1 running, 1 pending" in text
    hopeless = [line for line in text.splitlines() if "hopeless" in line]
    assert hopeless == [
        "standard-debug-s0 looks hopeless: +0.80 nats against its baseline at step 30 (depth study drop)"
    ]


def test_the_time_that_is_left_follows_from_the_speed_so_far(plan: MakePlan, leave: Leave) -> None:
    """At 1e9 FLOPs in 2 seconds, what is left takes 2e-9 seconds a FLOP."""
    one = plan(variants=["standard"], seeds=[0, 1])
    leave("standard-debug-s0", "finished", 40)
    resolved = one.runs[1].resolved
    assert resolved is not None
    seconds = 40 * 512 * resolved.flops_per_token * 2e-9
    text = status_table(States().look(one.runs).values())
    minutes, rest = divmod(round(seconds), 60)
    assert f"1 of 2 ended; {f'{minutes}m{rest:02}s' if minutes else f'{rest}s'} of training left" in text


def test_the_table_fits_80_columns_whatever_is_in_it(plan: MakePlan) -> None:
    name = "a_variant_with_a_name_that_says_everything_about_it"
    long = plan(variants=["standard", {"variant": "control_block", "name": name}])
    record = {
        "loss_metrics/global_avg_loss": 10.123456,
        "throughput/global_tokens_per_s": 1_234_567.0,
        "memory/max_reserved(GiB)": 171.23,
        "time_metrics/end_to_end(s)": 9.9,
    }
    rows = [
        RunState(
            run,
            "interrupted",
            123_456,
            1_000_000,
            training=record,
            heldout={"heldout/loss": 12.345},
            versus={"vs_baseline/loss": -10.123},
        )
        for run in long.runs
    ]
    lines = status_table(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].startswith("a_var")
    assert "…" in lines[2]
    assert lines[2].split()[0] != lines[4].split()[0], "seeds can be told apart"


def test_a_look_reads_only_what_was_added(plan: MakePlan, leave: Leave) -> None:
    four = plan()
    folder = leave("standard-debug-s0", "running", 10)
    looks = States()
    assert looks.look(four.runs)["standard-debug-s0"].heldout["heldout/loss"] == 3.5
    folder.append_metrics(20, {"heldout/loss": 2.5})
    found = looks.look(four.runs)["standard-debug-s0"]
    assert (found.training["step"], found.heldout["heldout/loss"]) == (10, 2.5)
    folder.cut_metrics(10)
    assert looks.look(four.runs)["standard-debug-s0"].heldout["heldout/loss"] == 3.5


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = os.cpu_count() or 1
    assert [place["OMP_NUM_THREADS"] for place in places(1, 2)] == [str(max(1, cores // 2))] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [place["OMP_NUM_THREADS"] for place in places(2, 1)] == ["3"]


def test_gpus_are_disjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(3, 2)] == ["0,1,2", "3,4,5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8f,7")
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places(1, 3)] == ["5", "GPU-8f", "7"]
    with pytest.raises(UserError, match="--jobs 2 of --nproc 2 need 4 GPUs, and there are 3; use --jobs 1, or --nproc"):
        places(2, 2)
