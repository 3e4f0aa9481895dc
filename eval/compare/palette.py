"""The colours of pictures, on a light and on a dark page. Pictures are drawn in the light ones."""

from typing import Any

LIGHT = {
    "ink": "#1b1f24",
    "grid": "#d9dde3",
    "base": "#6b7280",
    "c1": "#0b6bcc",
    "c2": "#c2410c",
    "c3": "#0f7b4f",
    "c4": "#7c3aed",
    "c5": "#be185d",
    "c6": "#92600a",
    "c7": "#0e7490",
}
DARK = {
    "ink": "#e6e9ee",
    "grid": "#39414b",
    "base": "#a3abb8",
    "c1": "#6cb4ff",
    "c2": "#ff9466",
    "c3": "#4fd39a",
    "c4": "#b79bff",
    "c5": "#ff7ab6",
    "c6": "#e0b34d",
    "c7": "#4cc9e0",
}
_SERIES = [key for key in LIGHT if key.startswith("c")]
_DASHES = ("-", "--", ":")


def style(number: int, baseline: bool) -> dict[str, Any]:
    """Colour and dashes of a group: grey for the baseline, the ``number``-th of a row for the others."""
    if baseline:
        return {"color": LIGHT["base"], "linestyle": "-"}
    return {
        "color": LIGHT[_SERIES[number % len(_SERIES)]],
        "linestyle": _DASHES[number // len(_SERIES) % len(_DASHES)],
    }
