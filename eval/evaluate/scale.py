"""The vertical scale of a picture of bins: one that a bin of a few tokens does not set."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

FEW_TOKENS = 1000
"""A mean over fewer tokens may be far from the others by chance: single losses spread over several nats."""
FENCE = 3.0
"""How many interquartile ranges outside the quartiles a value is far from the others (Tukey 1977: "far out")."""
MARGIN = 0.08
"""Of the scale's length, left free at each end."""


def far_out(values: Sequence[float], tokens: Sequence[int]) -> np.ndarray:
    """Which of the ``values`` are far from the others and each a mean over few ``tokens``: a boolean for each."""
    low, high = np.quantile(values, [0.25, 0.75])
    fence = FENCE * (high - low)
    far = (np.asarray(values) < low - fence) | (np.asarray(values) > high + fence)
    return far & (np.asarray(tokens) < FEW_TOKENS)


def keep_to_scale(
    axes: Axes, at: Sequence[float], tokens: Sequence[int], *curves: Sequence[float], also: Sequence[float] = ()
) -> None:
    """Let the ``curves`` over bins at ``at``, the last lines of ``axes``, set the scale without their values far out.

    Where a value is not on the scale, an arrow at the edge says what it is and of how many tokens, and the line ends
    before it. The values ``also`` are on the scale in any case.
    """
    values = np.array(curves)
    out = np.array([far_out(curve, tokens) for curve in curves])
    if not out.any():
        return
    seen = [*values[~out], *also]
    space = MARGIN * ((max(seen) - min(seen)) or 1.0)
    bottom, top = min(seen) - space, max(seen) + space
    axes.set_ylim(bottom, top)
    lines = axes.lines[-len(curves) :]
    for curve, number in zip(*np.nonzero(out & ((values < bottom) | (values > top))), strict=True):
        value, count, above = values[curve, number], tokens[number], values[curve, number] > top
        heights = np.array(lines[curve].get_ydata(), dtype=float)
        heights[number] = np.nan
        lines[curve].set_ydata(heights)
        axes.annotate(
            f"{'↑' if above else '↓'} {value:.3g} ({count:,} token{'s' if count > 1 else ''})",
            (at[number], top if above else bottom),
            xytext=(0, -11 * (1 + int(curve)) if above else 4 + 9 * int(curve)),
            textcoords="offset points",
            fontsize=7,
            color=lines[curve].get_color(),
        )
