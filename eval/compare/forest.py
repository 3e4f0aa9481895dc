"""The first picture of a report: each variant's difference to the baseline with its interval, and what it costs."""

import math

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import blended_transform_factory

from eval.compare.drawing import STYLE, WIDTH, as_svg, shown
from eval.compare.numbers import ratio
from eval.compare.palette import LIGHT
from eval.compare.results import UNDECIDED, FamilyResult, GroupResult

COSTS = {"tokens_per_s": "tokens/s", "step_seconds": "step time", "peak_memory_gib": "memory"}
"""Columns beside the intervals. Of speed one: tokens/s, or step time where tokens/s were not logged."""
_COLOURS = {"better": LIGHT["c1"], "worse": LIGHT["c2"]}
_MARKERS = {"better": "v", "worse": "^", UNDECIDED: "o"}
_ROW, _HEAD, _FOOT = 0.42, 0.3, 0.55
_LEFT, _PLOT = 0.03, 0.64
_COLUMNS = (0.79, 0.93)
"""Shares of the width: where the plot begins, how wide it is, and the middles of the columns beside it."""


def forest_picture(family: FamilyResult) -> str | None:
    """One row for each variant, in the order of the verdicts; None where no difference is known.

    The label stands above the interval, so that a phone shows both. Below zero, to the left, is better; the marker
    points down for better and up for worse, as the loss does.
    """
    rows = [group for group in family.in_order if group.mean is not None and not group.reference]
    if family.baseline is None or not rows:
        return None
    with rc_context({**STYLE, "axes.spines.left": False, "axes.grid": False}):
        height = _HEAD + _ROW * len(rows) + _FOOT
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((_LEFT, _FOOT / height, _PLOT, _ROW * len(rows) / height))
        _limits(axes, rows)
        costs = _costs(rows)
        for place, cost in zip(_COLUMNS, costs, strict=False):
            figure.text(place, 1 - 0.12 / height, COSTS[cost], ha="center", va="center", fontsize=8)
        figure.text(_LEFT, 1 - 0.12 / height, _head(family), va="center", fontsize=8)
        for number, group in enumerate(rows):
            _draw_row(figure, axes, group, number, costs)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks([])
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.set_xlabel("loss − baseline's (left: better)")
        return as_svg(figure)


def _head(family: FamilyResult) -> str:
    size = f"size {shown(family.size)}: " if family.size else ""
    return f"{size}verdict, 95% interval"


def _costs(rows: list[GroupResult]) -> list[str]:
    known = [cost for cost in COSTS if any(group.costs[cost].ratio is not None for group in rows)]
    return [cost for cost in known if cost != "step_seconds" or "tokens_per_s" not in known]


def _limits(axes: Axes, rows: list[GroupResult]) -> None:
    """So wide that all finite ends and 0 are seen."""
    found = [0.0]
    for group in rows:
        ends = (group.difference.low, group.difference.high) if group.difference else ()
        found += [end for end in (group.mean, *ends) if end is not None and math.isfinite(end)]
    room = 0.06 * (max(found) - min(found)) or 0.01
    axes.set_xlim(min(found) - room, max(found) + room)


def _draw_row(figure: Figure, axes: Axes, group: GroupResult, number: int, costs: list[str]) -> None:
    colour = _COLOURS.get(group.verdict, LIGHT["base"])
    mean, left, right = group.mean, *axes.get_xlim()
    assert mean is not None
    axes.plot([0, 0], [number - 0.02, number + 0.42], color=LIGHT["base"], linewidth=1.2)  # not through the label
    if group.difference is not None:
        low, high = max(group.difference.low, left), min(group.difference.high, right)
        axes.plot([low, high], [number + 0.2] * 2, color=colour, linewidth=2, solid_capstyle="butt")
        for end, edge, sign in ((group.difference.low, left, "<"), (group.difference.high, right, ">")):
            if math.isinf(end):  # an open end is an arrow
                axes.plot(edge, number + 0.2, sign, color=colour, markersize=6, clip_on=False)
    axes.plot(mean, number + 0.2, _MARKERS.get(group.verdict, "o"), color=colour, markersize=7)
    said = f"{shown(group.label)}: {group.verdict}" + (", but…" if group.reservations else "")
    axes.text(0, number - 0.22, said, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5)
    beside = blended_transform_factory(figure.transFigure, axes.transData)
    for place, cost in zip(_COLUMNS, costs, strict=False):
        said = ratio(group.costs[cost].ratio)
        figure.text(place, number + 0.2, said, transform=beside, ha="center", va="center", fontsize=8.5)
