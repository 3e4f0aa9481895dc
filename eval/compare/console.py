"""The main table for a terminal of 80 columns."""

from textwrap import wrap

from eval.compare.numbers import NONE, between, interval, loss, p_value, plural, ratio, signed
from eval.compare.results import FamilyResult, GroupResult, Results
from eval.compare.sections.words import how_judged, loss_name, with_reservations, without_rows
from eval.scaling.results import ScalingResult

_WIDTH = 80
_COLUMNS = ("loss", "difference", "95% interval", "p", "time", "memory", "verdict")
_WIDTHS = (8, 10, 18, 8, 6, 6, 11)
_MARGIN = 2


def main_table(results: Results) -> str:
    """One line of numbers for each group, its name above them."""
    lines: list[str] = []
    for family in results.families:
        lines += [*_family(family), ""]
    lines += _scaling(results.scaling)
    for sentence in without_rows(results, str):
        lines += _wrapped(sentence)
    for out in results.left_out:
        lines += _wrapped(f"left out  {out['name']}: {out['why']}")
    return "\n".join(lines).rstrip()


def _family(family: FamilyResult) -> list[str]:
    what = loss_name(family.measure)
    size = f"size {family.size}, " if family.size else ""
    against = f"baseline {family.baseline}" if family.baseline else "no baseline"
    lines = [*_wrapped(f"{size}{what} in nats per token, {against}"), _line(_COLUMNS)]
    for group in family.in_order:
        lines += [f"{group.label} ({_seeds(group)})", _line(_cells(group, family))]
        if group.reservations:
            lines += _wrapped(f"  {group.verdict}{with_reservations(group)}")
    for sentence in how_judged(family.test, str):
        lines += _wrapped(sentence)
    for warning in family.warnings:
        lines += _wrapped(f"note: {warning}")
    return lines


def _seeds(group: GroupResult) -> str:
    """``4 seeds, 2 diverged``."""
    return ", ".join([plural(len(group.seeds), "seed"), *group.fates])


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
        signed(group.mean),
        interval(group.paired if group.reference else found),
        p_value(found.p if found else None),
        ratio(group.costs["step_seconds"].ratio),
        ratio(group.costs["peak_memory_gib"].ratio),
        f"{group.steps} steps" if group.reference else group.verdict,
    ]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return (" " * _MARGIN + " ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))).rstrip()
