"""Reading a curve between its points: the loss at a budget, and the budget at a loss.

Between two measurements the loss is taken to be a straight line over the logarithm of the axis. Nothing is ever read
before a curve's first point or behind its last.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from eval.compare.run import Curve, Run

_ROUNDING = 1e-9
"""A budget this close to a curve's end, relatively, is its end."""


def has_axis(curve: Curve, axis: str) -> bool:
    """Whether the whole curve is known on the axis: increasing numbers above zero."""
    at = curve.axes[axis]
    return len(at) > 0 and bool(np.all(np.isfinite(at)) and at[0] > 0 and np.all(np.diff(at) > 0))


def value_at(curve: Curve, axis: str, budget: float) -> float | None:
    """The loss when the axis stands at ``budget``; None outside the curve."""
    at = curve.axes[axis]
    if not at[0] * (1 - _ROUNDING) <= budget <= at[-1] * (1 + _ROUNDING):
        return None
    return float(np.interp(math.log(budget), np.log(at), curve.values))


@dataclass(frozen=True)
class Crossing:
    """Where a curve first is at a loss or below it. ``at_most``: before the first measurement, so it may be sooner."""

    budget: float
    at_most: bool = False


def reaches(curve: Curve, axis: str, loss: float) -> Crossing | None:
    """The budget at which the curve first comes down to ``loss``; None where it never does."""
    at, below = curve.axes[axis], np.flatnonzero(curve.values <= loss)
    if not len(below):
        return None
    index = int(below[0])
    if index == 0:
        return Crossing(float(at[0]), at_most=True)
    (before, after), (above, under) = np.log(at[index - 1 : index + 1]), curve.values[index - 1 : index + 1]
    share = (above - loss) / (above - under)
    return Crossing(math.exp(before + share * (after - before)))


def learning_rate_share(run: Run, curve: Curve, axis: str, budget: float) -> float | None:
    """The learning rate at ``budget`` as a share of the run's peak; None where it was not logged."""
    steps, rates = run.learning_rate
    if not len(steps) or not np.max(rates) > 0:
        return None
    step = np.interp(budget, curve.axes[axis], curve.steps)
    return float(np.interp(step, steps, rates) / np.max(rates))


def smoothed(curve: Curve, share: float = 0.05) -> Curve:
    """Each value replaced by the mean over itself and those of the last ``share`` of the curve before it."""
    window = max(1, round(len(curve) * share))
    sums = np.cumsum(np.concatenate([[0.0], curve.values]))
    ends = np.arange(1, len(curve) + 1)
    starts = np.maximum(0, ends - window)
    return Curve(curve.steps, (sums[ends] - sums[starts]) / (ends - starts), curve.axes)


ReadCurve = Callable[[Run], Curve]
READ: dict[str, ReadCurve] = {"heldout": lambda run: run.heldout, "training": lambda run: smoothed(run.training)}
"""The curve that is compared, by the measure of its family."""


def measure_of(runs: Iterable[Run]) -> str:
    """``heldout``, or ``training`` where no run measured a held-out loss."""
    return "heldout" if any(len(run.heldout) for run in runs) else "training"
