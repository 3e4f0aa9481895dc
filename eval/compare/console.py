"""The main table for a terminal of 80 columns."""

from textwrap import wrap

from eval.compare.numbers import NONE, between, interval, loss, p_value, ratio, signed
from eval.compare.results import FamilyResult, GroupResult, Results
from eval.scaling.results import ScalingResult

_WIDTH = 80
_COLUMNS = ("loss", "difference", "95% interval", "p, Holm", "time", "memory", "verdict")
_WIDTHS = (8, 10, 18, 8, 6, 6, 11)
_MARGIN = 2


def main_table(results: Results) -> str:
    """One line of numbers for each group, its name above them."""
    lines: list[str] = []
    for family in results.families:
        lines += [*_family(family), ""]
    lines += _scaling(results.scaling)
    for out in results.left_out:
        lines += _wrapped(f"left out  {out['name']}: {out['why']}")
    return "\n".join(lines).rstrip()


def _family(family: FamilyResult) -> list[str]:
    what = "held-out loss" if family.measure == "heldout" else "training loss"
    size = f"size {family.size}, " if family.size else ""
    against = f"baseline {family.baseline}" if family.baseline else "no baseline"
    lines = [*_wrapped(f"{size}{what} in nats per token, {against}"), _line(_COLUMNS)]
    for group in family.groups:
        seeds = f"{len(group.seeds)} seed{'s' if len(group.seeds) != 1 else ''}"
        diverged = f", {len(group.diverged)} diverged" if group.diverged else ""
        lines += [f"{group.label} ({seeds}{diverged})", _line(_cells(group, family))]
    for warning in family.warnings:
        lines += _wrapped(f"note: {warning}")
    return lines


def _scaling(scaling: ScalingResult | None) -> list[str]:
    """The gain at the largest size, where there are laws."""
    if scaling is None or not any(ladder.gains for ladder in scaling.ladders):
        return []
    lines = _wrapped("compute-equivalent gain: compute that the baseline needs for the same loss, by scaling laws")
    for ladder in scaling.ladders:
        for gain in ladder.gains[-1:]:
            sure = between(gain.gain)
            value = "none, as the baseline's law never has its loss," if gain.gain is None else ratio(gain.gain.value)
            interval = "" if sure == NONE else f" (95% {sure})"
            far = ", far outside the data" if gain.far else ""
            lines += _wrapped(f"{ladder.label}: {value} at {gain.size}{interval}{far}")
    return [*lines, ""]


def _wrapped(text: str) -> list[str]:
    return wrap(text, _WIDTH, subsequent_indent=" " * _MARGIN, break_long_words=False)


def _cells(group: GroupResult, family: FamilyResult) -> list[str]:
    if group.label == family.baseline or family.baseline is None:
        return [loss(group.loss), *[""] * 6]
    found = group.difference
    return [
        loss(group.loss),
        signed(found.mean) if found else NONE,
        interval(found),
        p_value(group.p_holm),
        ratio(group.costs["step_seconds"].ratio),
        ratio(group.costs["peak_memory_gib"].ratio),
        f"{group.steps} steps" if group.reference else group.verdict,
    ]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return (" " * _MARGIN + " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))).rstrip()
