"""Numbers for people."""

import math
import re

from eval.compare.judging import Comparison
from eval.compare.statistics import Estimate
from eval.scaling.results import Interval

UNITS = {"tokens": "training tokens", "flops": "training FLOPs", "seconds": "training time"}
COST_TITLES = {
    "tokens_per_s": "tokens/s",
    "step_seconds": "step time",
    "peak_memory_gib": "peak memory",
    "flops_per_token": "FLOPs per token",
    "parameters": "parameters",
}
_STEPS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMbBgGtT]?)")
NONE = "–"


def large(value: float | None) -> str:
    """Three digits and a unit prefix: ``74.7M``."""
    if value is None:
        return NONE
    for size, letter in _STEPS:
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def size_order(size: str | None) -> tuple[float, str]:
    """By number, so that 1.2M is before 10M; sizes that are no number come last, by name."""
    match = _SIZE.fullmatch(size or "")
    prefixes = {letter.upper(): factor for factor, letter in _STEPS}
    prefixes["B"] = prefixes["G"]
    if match is None:
        return math.inf, size or ""
    return float(match[1]) * prefixes.get(match[2].upper(), 1.0), size or ""


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def amount(axis: str, value: float | None) -> str:
    """A budget on one of ``AXES``."""
    return seconds(value) if axis == "seconds" else large(value)


def cost(name: str, value: float | None) -> str:
    if value is None or name == "step_seconds":
        return seconds(value)
    return f"{value:.3g} GiB" if name == "peak_memory_gib" else large(value)


def ratio(value: float | None) -> str:
    """``1.19×``; a third digit where there is little else to see, ``1.003×``."""
    if value is None:
        return NONE
    close = 0.0005 <= abs(value - 1) < 0.005
    return f"{value:.3f}×" if close else f"{value:.2f}×"


def loss(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def signed(value: float | None) -> str:
    return NONE if value is None else f"{value:+.4f}"


def interval(found: Estimate | Comparison | None) -> str:
    if found is None or found.low is None or found.high is None:
        return NONE
    if math.isinf(found.low) or math.isinf(found.high):
        ends = [f"{signed(found.low)} or more"] if math.isfinite(found.low) else []
        ends += [f"{signed(found.high)} or less"] if math.isfinite(found.high) else []
        return ends[0] if ends else "open"
    return f"{signed(found.low)} to {signed(found.high)}"


def between(found: Interval | None) -> str:
    """The interval of a ratio."""
    if found is None or found.low is None or found.high is None:
        return NONE
    return f"{ratio(found.low)} to {ratio(found.high)}" if math.isfinite(found.high) else f"{ratio(found.low)} or more"


def half_width(found: Estimate) -> str:
    return "" if found.low is None or found.high is None else f" ± {(found.high - found.low) / 2:.4f}"


def p_value(value: float | None) -> str:
    return NONE if value is None else "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
