"""The colours of pictures, on a light and on a dark page. Pictures are drawn in the light ones.

No two are nearer to each other than 15 by CIEDE2000, for readers with full colour vision and for those without the
cones for red or green (Machado et al. 2009); groups differ by marker as well.
"""

from typing import Any

LIGHT = {
    "ink": "#1b1f24",
    "grid": "#d9dde3",
    "base": "#6b7280",
    "c1": "#4261c7",
    "c2": "#c76e26",
    "c3": "#03a57f",
    "c4": "#2f14ad",
    "c5": "#5f8dff",
    "c6": "#891514",
    "c7": "#6b1d39",
}
DARK = {
    "ink": "#e6e9ee",
    "grid": "#39414b",
    "base": "#a3abb8",
    "c1": "#63a7ff",
    "c2": "#e41a08",
    "c3": "#7eb27c",
    "c4": "#496cd2",
    "c5": "#8af9d4",
    "c6": "#aa5b76",
    "c7": "#6cf40e",
}
_SERIES = [key for key in LIGHT if key.startswith("c")]
_DASHES = ("-", "--", ":")
_MARKERS = "s^DvPX*"


def style(number: int, baseline: bool) -> dict[str, Any]:
    """Colour, dashes and marker of a group: grey for the baseline, the ``number``-th of a row for the others."""
    if baseline:
        return {"color": LIGHT["base"], "linestyle": "-", "marker": "o"}
    return {
        "color": LIGHT[_SERIES[number % len(_SERIES)]],
        "linestyle": _DASHES[number // len(_SERIES) % len(_DASHES)],
        "marker": _MARKERS[(number + 3 * (number // len(_SERIES))) % len(_MARKERS)],
    }
