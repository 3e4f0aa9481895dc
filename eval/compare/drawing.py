"""What all pictures share: their style, one layout that is set and not searched for, and how they become SVG.

matplotlib's own search for a layout draws every picture twice more; these pictures have one plot each, so that margins
in inches do.
"""

import io
import math
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.compare.palette import LIGHT

STYLE: dict[Any, Any] = {
    "axes.edgecolor": LIGHT["grid"],
    "axes.labelcolor": LIGHT["ink"],
    "text.color": LIGHT["ink"],
    "xtick.color": LIGHT["ink"],
    "ytick.color": LIGHT["ink"],
    "grid.color": LIGHT["grid"],
    "legend.edgecolor": LIGHT["grid"],
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
}
WIDTH = 4.3
"""Inches: narrow, so that the text can be read on a phone."""
LONGEST_LABEL = 48
_PLOT, _LEFT, _RIGHT, _TOP, _BELOW, _LINE = 2.45, 0.72, 0.1, 0.12, 0.5, 0.17
"""Inches: height of the plot, margins, room for ticks and title below it, one line of the legend."""
_SHORT_LABEL = 24


def frame(right: float = _RIGHT) -> tuple[Figure, Axes]:
    """A figure with one plot; ``right``: the margin there, inches."""
    figure = Figure(figsize=(WIDTH, _TOP + _PLOT + _BELOW))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    _place(figure, axes, right, legend=0.0)
    return figure, axes


def legend(figure: Figure, axes: Axes) -> None:
    """The legend below the plot, for which the figure grows."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels), default=0) <= _SHORT_LABEL else 1
    _place(figure, axes, _RIGHT, legend=_LINE * math.ceil(len(labels) / columns) + 0.06)
    texts = [shown(label) for label in labels]
    figure.legend(
        handles,
        texts,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.0),
        borderaxespad=0.1,
        labelspacing=0.25,
        ncols=columns,
        fontsize=8,
        frameon=False,
    )


def _place(figure: Figure, axes: Axes, right: float, legend: float) -> None:
    height = _TOP + _PLOT + _BELOW + legend
    figure.set_size_inches(WIDTH, height)
    axes.set_position((_LEFT / WIDTH, (_BELOW + legend) / height, (WIDTH - _LEFT - right) / WIDTH, _PLOT / height))


def shown(label: str) -> str:
    """The label as matplotlib has to be given it: a dollar sign begins mathematics, an underscore hides it."""
    short = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
    escaped = short.replace("$", r"\$")
    return f"\u200b{escaped}" if escaped.startswith("_") else escaped


def as_svg(figure: Figure) -> str:
    """The figure as an SVG element, in the colours of a light page, with text as text."""
    file = io.StringIO()
    empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "depth"}):
        figure.savefig(file, format="svg", transparent=True, metadata=empty)
    svg = file.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL).strip()


def alone(svg: str) -> str:
    """A picture of ``as_svg`` as a file of its own, on white."""
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace(
        "<defs>", '<rect width="100%" height="100%" fill="#ffffff"/>\n <defs>', 1
    )
