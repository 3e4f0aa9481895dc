"""The report's pictures of curves, costs, depth and scaling, each as an SVG element."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from eval.compare.drawing import STYLE, as_svg, frame, legend
from eval.compare.palette import LIGHT, style
from eval.compare.results import Band, FamilyResult, GroupResult
from eval.scaling.results import LadderResult

_AXIS_TITLES = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "training time (seconds)"}
_COLOUR_BAR = 0.8
"""Inches right of a map."""
_MARKERS = 8
"""On one curve: enough to tell it by, too few to hide it."""
_HIDDEN = 0.1
"""Share of training that curves leave out at the start: there the loss falls too fast for differences to be seen."""


def loss_picture(family: FamilyResult, axis: str, curves: str, title: str) -> str | None:
    """``curves`` is an attribute of ``GroupResult``; None where no group has that axis."""
    shown = [
        (group, bands[axis], styling)
        for group, styling in zip(family.groups, _styles(family), strict=True)
        if axis in (bands := getattr(group, curves))
    ]
    if not shown:
        return None
    with rc_context(STYLE):
        figure, axes = frame()
        start = _HIDDEN * max(band.x[-1] for _, band, _ in shown)
        for group, band, styling in shown:
            _draw_band(axes, _cut(band, start), group.label, styling)
        _finish(figure, axes, axis, title)
    return as_svg(figure)


def difference_picture(family: FamilyResult, axis: str) -> str | None:
    shown = [
        (group, group.difference_curves[axis], styling)
        for group, styling in zip(family.groups, _styles(family), strict=True)
        if axis in group.difference_curves and not group.reference
    ]
    if not shown:
        return None
    with rc_context(STYLE):
        figure, axes = frame()
        axes.axhline(0, color=LIGHT["base"], linewidth=1.6, label=family.baseline)
        start = _HIDDEN * max(band.x[-1] for _, band, _ in shown)
        for group, band, styling in shown:
            _draw_band(axes, _cut(band, start), group.label, styling)
        _finish(figure, axes, axis, "loss − baseline's")
    return as_svg(figure)


def cost_picture(family: FamilyResult, cost: str, title: str) -> str | None:
    """The final loss's difference over the ratio of a cost, with 95% intervals where there are any."""
    with rc_context(STYLE):
        figure, axes = frame()
        drawn = 0
        for group, styling in zip(family.groups, _styles(family), strict=True):
            x = 1.0 if group.label == family.baseline else group.costs[cost].ratio
            found = group.difference
            y = 0.0 if group.label == family.baseline else group.mean
            if x is None or y is None or group.reference:
                continue
            drawn += 1
            spread = None
            if found is not None:  # an open end gets no bar
                bars = (y - found.low, found.high - y)
                spread = [[bar if math.isfinite(bar) else 0.0] for bar in bars]
            axes.errorbar(x, y, yerr=spread, capsize=3, color=styling["color"])
            axes.plot(x, y, styling["marker"], markersize=6, color=styling["color"], label=group.label)
        if drawn < 2:
            return None
        axes.axhline(0, color=LIGHT["base"], linewidth=0.8)
        axes.axvline(1, color=LIGHT["base"], linewidth=0.8)
        axes.margins(0.15)
        axes.set_xlabel(f"{title}, as a multiple of the baseline's")
        axes.set_ylabel("final loss − baseline's")
        legend(figure, axes)
    return as_svg(figure)


def sweep_picture(family: FamilyResult, measure: str) -> str:
    """Mean final loss over the learning rate, one line for each row that was swept; the best rate is filled."""
    styles = dict(zip((group.label for group in family.groups), _styles(family), strict=True))
    with rc_context(STYLE):
        figure, axes = frame()
        for swept in family.sweeps:
            known = [
                (one.rate, one.loss, one.low, one.high)
                for one in swept.sweep.rates
                if one.loss is not None and one.low is not None and one.high is not None
            ]
            rates, losses, low, high = map(list, zip(*known, strict=True))
            styling = styles[swept.label]
            axes.plot(rates, losses, markersize=5, markerfacecolor="none", label=swept.label, **styling)
            axes.fill_between(rates, low, high, color=styling["color"], alpha=0.18, linewidth=0)
            best = rates.index(swept.sweep.best)
            axes.plot(rates[best], losses[best], styling["marker"], markersize=7, color=styling["color"])
        tried = sorted({one.rate for swept in family.sweeps for one in swept.sweep.rates if one.loss is not None})
        axes.set_xscale("log")
        axes.set_xticks(tried, [f"{rate:g}" for rate in tried])
        axes.minorticks_off()
        axes.set_xlabel("learning rate")
        axes.set_ylabel(f"final {measure}")
        legend(figure, axes)
    return as_svg(figure)


def depth_series_picture(groups: Sequence[GroupResult], family: FamilyResult, name: str) -> str:
    styles = dict(zip((group.label for group in family.groups), _styles(family), strict=True))
    with rc_context(STYLE):
        figure, axes = frame()
        for group in groups:
            values = group.depth_series[name]
            axes.plot(range(len(values)), values, label=group.label, markersize=4, **styles[group.label])
        axes.set_xlabel("layer or read, in order of depth")
        axes.set_ylabel(name.replace("_", " "))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        legend(figure, axes)
    return as_svg(figure)


def depth_map_picture(rows: Sequence[Sequence[float]]) -> str:
    """One row per read, one column per source; what a read does not see stays empty."""
    width = max(len(row) for row in rows)
    padded = [[*row, *[math.nan] * (width - len(row))] for row in rows]
    with rc_context({**STYLE, "axes.grid": False}):
        figure, axes = frame(right=_COLOUR_BAR)
        image = axes.imshow(padded, aspect="auto", interpolation="nearest", vmin=0.0, vmax=1.0, cmap="viridis")
        axes.set_xlabel("source, oldest first (0: embedding)")
        axes.set_ylabel("read, in order of depth")
        place = axes.get_position()
        beside = figure.add_axes((place.x1 + 0.03, place.y0, 0.035, place.height))
        figure.colorbar(image, cax=beside, label="mean weight")
        return as_svg(figure)


def scaling_picture(ladders: Sequence[LadderResult], measure: str) -> str:
    """Final losses over training FLOPs, each a size (and length), with the laws and their bands where there are any."""
    bases = {ladder.baseline for ladder in ladders}
    others = iter(range(len(ladders)))
    with rc_context(STYLE):
        figure, axes = frame()
        for ladder in ladders:
            baseline = ladder.label in bases
            styling = style(0 if baseline else next(others), baseline)
            flops, losses = [point.flops for point in ladder.points], [point.loss for point in ladder.points]
            axes.plot(flops, losses, styling["marker"], markersize=5, color=styling["color"], label=ladder.label)
            line = ladder.line
            if line is not None:
                axes.plot(line.flops, line.loss, **{**styling, "marker": ""})
                if line.low:
                    axes.fill_between(line.flops, line.low, line.high, color=styling["color"], alpha=0.18, linewidth=0)
        axes.set_xscale("log")
        axes.set_xlabel("training FLOPs")
        axes.set_ylabel(f"final {measure}")
        legend(figure, axes)
    return as_svg(figure)


def _styles(family: FamilyResult) -> list[dict[str, Any]]:
    others = iter(range(len(family.groups)))
    return [
        style(0, baseline=True) if group.label == family.baseline else style(next(others), baseline=False)
        for group in family.groups
    ]


def _cut(band: Band, start: float) -> Band:
    first = next((index for index, x in enumerate(band.x) if x >= start), 0)
    return Band(band.x[first:], band.mean[first:], band.low[first:], band.high[first:])


def _draw_band(axes: Axes, band: Band, label: str, styling: dict[str, Any]) -> None:
    every = max(1, len(band.x) // _MARKERS)
    axes.plot(band.x, band.mean, label=label, markersize=4, markevery=(every // 2, every), **styling)
    if band.low != band.high:
        axes.fill_between(band.x, band.low, band.high, color=styling["color"], alpha=0.18, linewidth=0)


def _finish(figure: Figure, axes: Axes, axis: str, title: str) -> None:
    axes.set_xlabel(_AXIS_TITLES[axis])
    axes.set_ylabel(title)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    legend(figure, axes)
