"""A run that is stopped, killed, moved to other ranks or extended goes on as if nothing had happened."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_ext.run_folder import RunFolder

pytestmark = pytest.mark.slow

STEPS = 60
VOLATILE = ("time", "throughput", "tflops", "mfu", "time_metrics", "memory", "progress/train_seconds")
"""What depends on the machine and the moment."""


def steady(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(VOLATILE)}


def training(folder: RunFolder) -> dict[int, dict[str, Any]]:
    records = [record for record in folder.metrics() if "grad_norm" in record]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return {record["step"]: steady(record) for record in records}


def heldout(folder: RunFolder) -> dict[int, dict[str, Any]]:
    records = [steady(record) for record in folder.metrics() if "heldout/loss" in record]
    assert [record["step"] for record in records] == list(range(20, STEPS + 1, 20))
    return {record["step"]: record for record in records}


@pytest.fixture(scope="module")
def broken(launch: Callable[..., Any]) -> RunFolder:
    """The debug run stopped by SIGTERM, then killed outright between two checkpoints, then finished."""
    first = launch("broken")
    first.signal_at(10, signal.SIGTERM)
    status = first.folder.status()
    assert status is not None
    assert status["state"] == "stopped"
    assert 10 <= status["step"] < 20
    assert (first.folder.checkpoint_path / f"step-{status['step']}").is_dir()

    launch("broken").signal_at(30, signal.SIGKILL)
    killed = max(record["step"] for record in first.folder.metrics())
    assert 30 <= killed < 40, "the point of this test is that steps after the checkpoint were lost"
    return launch("broken").finish().folder


def test_a_stopped_and_a_killed_run_repeat_the_unbroken_one(unbroken: RunFolder, broken: RunFolder) -> None:
    """Losses, gradient norms, learning rates, tokens and FLOPs, step for step and to the last bit."""
    assert training(broken) == training(unbroken)
    assert heldout(broken) == heldout(unbroken)


def test_the_loss_falls(unbroken: RunFolder) -> None:
    losses = {step: record["loss_metrics/global_avg_loss"] for step, record in training(unbroken).items()}
    assert losses[1] == pytest.approx(6.24, abs=0.1), "ln 512 at the start"
    assert losses[STEPS] < losses[1] - 1.0
    assert heldout(unbroken)[STEPS]["heldout/loss"] < heldout(unbroken)[20]["heldout/loss"]


def test_status_and_counters_at_the_end(broken: RunFolder) -> None:
    status = broken.status()
    assert status is not None
    assert (status["state"], status["step"], status["steps"]) == ("finished", STEPS, STEPS)
    last = [record for record in broken.metrics() if "grad_norm" in record][-1]
    assert last["progress/tokens"] == STEPS * 512
    assert last["progress/train_flops"] == STEPS * 512 * broken.facts()["flops_per_token"]
    seconds = [record["progress/train_seconds"] for record in broken.metrics() if "grad_norm" in record]
    assert seconds == sorted(seconds), "training seconds go on across resumes"


@pytest.mark.parametrize("which", ["unbroken", "broken"])
def test_tensorboard_has_one_curve(which: str, request: pytest.FixtureRequest) -> None:
    folder: RunFolder = request.getfixturevalue(which)
    events = EventAccumulator(str(folder.tensorboard_path), size_guidance={"scalars": 0}).Reload()
    for tag in ("loss_metrics/global_avg_loss", "grad_norm", "throughput/global_tokens_per_s", "mfu(%)"):
        assert [event.step for event in events.Scalars(tag)] == list(range(1, STEPS + 1)), tag
    logged = {record["step"]: record for record in folder.metrics() if "heldout/loss" in record}
    for event in events.Scalars("heldout/loss"):
        assert event.value == pytest.approx(logged[event.step]["heldout/loss"], rel=1e-6)
    assert not [entry for entry in folder.tensorboard_path.iterdir() if entry.is_dir()]


def test_the_last_two_checkpoints_and_the_milestones_are_kept(launch: Callable[..., Any]) -> None:
    overrides = ("--checkpoint.every", "5", "--checkpoint.milestones", "[7, 10]", "--training.steps", "22")
    folder = launch("kept", *overrides, ranks=1).finish().folder
    assert sorted(path.name for path in folder.checkpoint_path.iterdir()) == ["step-10", "step-20", "step-22", "step-7"]


def test_two_ranks_then_one_then_two(unbroken: RunFolder, launch: Callable[..., Any]) -> None:
    launch("ranks", ranks=2).signal_at(15, signal.SIGTERM)
    launch("ranks", ranks=1).signal_at(35, signal.SIGTERM)
    folder = launch("ranks", ranks=2).finish().folder
    expected, found = training(unbroken), training(folder)
    for step in range(1, STEPS + 1):
        for name in ("loss_metrics/global_avg_loss", "grad_norm"):
            assert found[step][name] == pytest.approx(expected[step][name], abs=1e-4), (step, name)
        assert found[step]["progress/tokens"] == step * 512
    for step, record in heldout(folder).items():
        assert record["heldout/loss"] == pytest.approx(heldout(unbroken)[step]["heldout/loss"], abs=1e-4)


def test_a_finished_run_is_extended(launch: Callable[..., Any]) -> None:
    schedule = ("--optimizer.schedule", "cosine", "--optimizer.warmup_steps", "1", "--optimizer.min_lr_ratio", "1.0")
    whole = launch("whole", *schedule, "--training.steps", "30", ranks=1).finish().folder
    launch("extended", *schedule, "--training.steps", "20", ranks=1).finish()
    extended = launch("extended", *schedule, "--training.steps", "30", ranks=1).finish().folder
    assert training(extended) == training(whole)


def test_another_run_is_refused_before_anything_is_touched(unbroken: RunFolder, launch: Callable[..., Any]) -> None:
    files = {path: path.stat().st_mtime_ns for path in sorted(unbroken.path.rglob("*")) if path.is_file()}
    refused = launch("unbroken", "--model.layers", "3", "--data.seed", "1", ranks=1)
    assert refused.wait() != 0
    assert "holds another run: model.layers was 4, is 3; data.seed was 0, is 1" in refused.output
    assert "Traceback" not in refused.output.split("torch/distributed")[0]
    after = {path: path.stat().st_mtime_ns for path in sorted(unbroken.path.rglob("*")) if path.is_file()}
    assert files == after


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(launch: Callable[..., Any]) -> None:
    run = launch("diverged", "--optimizer.lr", "1e30", "--optimizer.warmup_steps", "0", ranks=1)
    assert run.wait() != 0
    assert "Loss is not finite" in run.output
    status = run.folder.status()
    assert status is not None
    assert status["state"] == "diverged"
    assert status["step"] < 10
