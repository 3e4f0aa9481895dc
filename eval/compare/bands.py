"""Curves of several seeds as one: mean, lowest and highest, over an axis."""

from collections.abc import Sequence

import numpy as np

from eval.compare.curves import ReadCurve, has_axis, smoothed, value_at
from eval.compare.results import Band
from eval.compare.run import AXES, Curve, Run

_POINTS = 150
"""A training loss is logged far more often than a picture can show."""


def loss_bands(runs: Sequence[Run], read: ReadCurve) -> dict[str, Band]:
    """One band for each axis that all ``runs`` know, over the range that all of them cover."""
    curves = [read(run) for run in runs]
    return {axis: band for axis in AXES if (band := _band(curves, axis)) is not None}


def training_bands(runs: Sequence[Run]) -> dict[str, Band]:
    """The same for the training loss, each value the mean over the last twentieth of the run before it."""
    return loss_bands(runs, lambda run: _thinned(smoothed(run.training)))


def difference_bands(pairs: Sequence[tuple[Run, Run]], read: ReadCurve) -> dict[str, Band]:
    """The difference to the baseline over training, at equal budgets, where both curves of each pair reach."""
    bands = {}
    for axis in AXES:
        curves = []
        for run, base in pairs:
            one, other = read(run), read(base)
            if not has_axis(one, axis) or not has_axis(other, axis):
                break
            points = [
                (float(at), mine - float(theirs))
                for at, theirs in zip(other.axes[axis], other.values, strict=True)
                if (mine := value_at(one, axis, float(at))) is not None
            ]
            at, values = np.array([x for x, _ in points]), np.array([y for _, y in points])
            curves.append(Curve(np.arange(len(at)), values, {axis: at}))
        band = _band(curves, axis) if len(curves) == len(pairs) else None
        if band is not None:
            bands[axis] = band
    return bands


def _band(curves: Sequence[Curve], axis: str) -> Band | None:
    if not curves or not all(has_axis(curve, axis) for curve in curves):
        return None
    at = curves[0].axes[axis]
    start, end = max(curve.axes[axis][0] for curve in curves), min(curve.axes[axis][-1] for curve in curves)
    grid = sorted({float(x) for x in at if start <= x <= end} | ({float(end)} if end >= start else set()))
    if not grid:
        return None
    values = np.array([[value_at(curve, axis, x) for x in grid] for curve in curves], dtype=float)
    return Band(grid, values.mean(0).tolist(), values.min(0).tolist(), values.max(0).tolist())


def _thinned(curve: Curve) -> Curve:
    kept = np.unique(np.linspace(0, len(curve) - 1, min(len(curve), _POINTS)).astype(int))
    return Curve(curve.steps[kept], curve.values[kept], {axis: at[kept] for axis, at in curve.axes.items()})
