"""A run beside its baseline: which steps are compared, when, and what the stopping rule makes of it."""

from pathlib import Path

import pytest

from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.versus import StoppingRule, Versus


class Record:
    """A run folder whose record is written by hand."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.folder.create()

    def log(self, step: int, loss: float, speed: float = 100.0, memory: float = 2.0, **more: float) -> dict[str, float]:
        metrics = {
            "loss_metrics/global_avg_loss": loss,
            "throughput/global_tokens_per_s": speed,
            "memory/max_reserved(GiB)": memory,
            **more,
        }
        self.folder.append_metrics(step, metrics)
        return metrics


@pytest.fixture
def mine(tmp_path: Path) -> Record:
    return Record(tmp_path / "mine")


@pytest.fixture
def baseline(tmp_path: Path) -> Record:
    return Record(tmp_path / "baseline")


def losses(comparisons: dict[int, dict[str, float]]) -> dict[int, float]:
    return {step: round(tags["vs_baseline/loss"], 6) for step, tags in comparisons.items()}


def test_a_difference_and_two_ratios_at_the_same_step(mine: Record, baseline: Record) -> None:
    baseline.log(10, loss=3.5, speed=400.0, memory=2.0)
    baseline.log(20, loss=3.0, speed=200.0, memory=4.0)
    versus = Versus(mine.folder, baseline.folder.path)
    versus.note(10, mine.log(10, loss=3.25, speed=100.0, memory=3.0))
    assert versus.compare() == {
        10: {"vs_baseline/loss": -0.25, "vs_baseline/tokens_per_s": 0.25, "vs_baseline/peak_memory": 1.5}
    }
    assert versus.compare() == {}
    versus.note(20, mine.log(20, loss=3.5, speed=100.0, memory=3.0))
    assert versus.compare() == {
        20: {"vs_baseline/loss": 0.5, "vs_baseline/tokens_per_s": 0.5, "vs_baseline/peak_memory": 0.75}
    }


def test_steps_that_the_baseline_has_not_reached_are_compared_later_and_in_order(
    mine: Record, baseline: Record
) -> None:
    versus = Versus(mine.folder, baseline.folder.path)
    for step in (5, 10, 15):
        versus.note(step, mine.log(step, loss=4.0))
        assert versus.compare() == {}
    baseline.log(5, loss=3.0)
    assert losses(versus.compare()) == {5: 1.0}
    baseline.log(10, loss=2.0)
    baseline.log(15, loss=1.0)
    assert list(losses(versus.compare()).items()) == [(10, 2.0), (15, 3.0)]


def test_steps_that_the_baseline_did_not_log_are_left_out(mine: Record, baseline: Record) -> None:
    baseline.log(10, loss=3.0)
    baseline.log(20, loss=3.0)
    versus = Versus(mine.folder, baseline.folder.path)
    for step in (5, 10, 15, 20):
        versus.note(step, mine.log(step, loss=4.0))
    assert losses(versus.compare()) == {10: 1.0, 20: 1.0}


def test_a_missing_or_damaged_baseline_never_stops_a_run(mine: Record, baseline: Record, tmp_path: Path) -> None:
    absent = Versus(mine.folder, tmp_path / "nowhere")
    absent.note(1, mine.log(1, loss=4.0))
    assert absent.compare() == {}

    with open(baseline.folder.metrics_path, "wb") as file:
        file.write(b'\xff\n{"step": 1}\n{"step": 2, "loss_metrics/global_avg_loss": "x"}\n[]\n{"step": nul\n')
    baseline.log(3, loss=float("nan"))
    baseline.log(4, loss=3.0, speed=0.0)
    baseline.log(5, loss=3.0, memory=0.0)
    baseline.log(6, loss=3.0)
    versus = Versus(mine.folder, baseline.folder.path)
    for step in range(1, 8):
        versus.note(step, mine.log(step, loss=4.0))
    assert losses(versus.compare()) == {6: 1.0}


def test_a_baseline_that_was_cut_back_is_read_again(mine: Record, baseline: Record) -> None:
    for step in (1, 2, 3):
        baseline.log(step, loss=3.0)
    versus = Versus(mine.folder, baseline.folder.path)
    versus.note(1, mine.log(1, loss=4.0))
    assert losses(versus.compare()) == {1: 1.0}
    baseline.folder.cut_metrics(1)
    versus.note(2, mine.log(2, loss=4.0))
    assert losses(versus.compare()) == {}, "step 2 is lost, and will be run again"
    baseline.log(2, loss=2.5)
    assert losses(versus.compare()) == {2: 1.5}


def test_after_a_resume_only_what_was_not_compared_is(mine: Record, baseline: Record) -> None:
    mine.log(1, loss=4.0, **{"vs_baseline/loss": 1.0})
    mine.log(2, loss=4.0)
    mine.log(3, loss=4.0)
    mine.folder.append_metrics(2, {"vs_baseline/loss": 1.0})  # what came later has a record of its own
    for step in (1, 2, 3):
        baseline.log(step, loss=3.0)
    assert losses(Versus(mine.folder, baseline.folder.path).compare()) == {3: 1.0}


def rule_at_10(mine: Record, baseline: Record) -> Versus:
    return Versus(mine.folder, baseline.folder.path, StoppingRule(behind=0.1, at=10))


@pytest.mark.parametrize(("difference", "ends"), [(0.11, True), (0.09, False), (-3.0, False)])
def test_the_stopping_rule(difference: float, ends: bool, mine: Record, baseline: Record) -> None:
    versus = rule_at_10(mine, baseline)
    for step in (5, 10):
        baseline.log(step, loss=3.0)
    versus.note(5, mine.log(5, loss=9.0))
    versus.compare()
    assert versus.verdict is None, "far behind, but before the step that counts"
    versus.note(10, mine.log(10, loss=3.0 + difference))
    versus.compare()
    assert (versus.verdict is not None) == ends
    if ends:
        assert "loss 0.1100 above" in str(versus.verdict)
        assert "at step 10" in str(versus.verdict)


def test_the_rule_is_decided_once_at_the_first_step_that_both_have_logged(mine: Record, baseline: Record) -> None:
    versus = rule_at_10(mine, baseline)
    for step, loss in ((8, 3.0), (12, 3.0), (16, 3.0)):
        baseline.log(step, loss=loss)
    versus.note(12, mine.log(12, loss=3.05))
    versus.compare()
    versus.note(16, mine.log(16, loss=9.0))
    versus.compare()
    assert versus.verdict is None


def test_the_rule_waits_for_a_slower_baseline(mine: Record, baseline: Record) -> None:
    versus = rule_at_10(mine, baseline)
    for step in (10, 20):
        versus.note(step, mine.log(step, loss=4.0))
        versus.compare()
    assert versus.verdict is None
    baseline.log(10, loss=3.0)
    versus.compare()
    assert versus.verdict is not None


def test_a_run_that_the_rule_ended_is_ended_again_when_it_is_resumed(mine: Record, baseline: Record) -> None:
    mine.log(10, loss=4.0, **{"vs_baseline/loss": 1.0})
    assert rule_at_10(mine, baseline).verdict is not None
    relaxed = Versus(mine.folder, baseline.folder.path, StoppingRule(behind=2.0, at=10))
    assert relaxed.verdict is None
