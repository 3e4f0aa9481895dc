"""The answer in a sentence for each variant."""

import math

from eval.compare.numbers import interval, plural, ratio
from eval.compare.page import Block, Bullets, Heading, name
from eval.compare.results import UNDECIDED, AtEqual, FamilyResult, GroupResult
from eval.compare.sections.words import is_equal, with_reservations

_MOST_NATS = 100.0
"""A difference beyond which a change in perplexity says no more (and soon is no number)."""


def short_blocks(family: FamilyResult) -> list[Block]:
    if family.baseline is None or len(family.groups) < 2:
        return []
    return [Heading("In short", 3), Bullets([_sentence(group, family) for group in family.in_order[1:]])]


def _sentence(group: GroupResult, family: FamilyResult) -> str:
    found, mean, base, label = group.difference, group.mean, name(family.baseline), name(group.label)
    if mean is None or group.paired is None:
        return f"{label}: no paired difference to {base}; {'; '.join(group.notes)}."
    if group.reference:
        return f"{label}: {base} itself, trained for {group.steps} steps; its final loss is {_side(mean)}."
    seeds = plural(group.paired.n, "seed")
    sure = f"95% interval {interval(found)}, {seeds}" if found else seeds
    parts = [
        f"{label}: **{group.verdict}**{with_reservations(group)}. Its final loss is {_side(mean)} that of {base} "
        f"({sure}), {100 * math.expm1(min(mean, _MOST_NATS)):+.1f}% in perplexity."
    ]
    step, memory = group.costs["step_seconds"].ratio, group.costs["peak_memory_gib"].ratio
    known = [f"{ratio(step)} the time"] if step is not None else []
    known += [f"{ratio(memory)} the memory"] if memory is not None else []
    if known:
        parts.append(f"A training step takes {' and '.join(known)}.")
    if group.verdict != UNDECIDED:
        parts += _equal("training FLOPs", group.at_equal["flops"], family)
        parts += _equal("training time", group.at_equal["seconds"], family)
    return " ".join(parts)


def _equal(what: str, found: AtEqual, family: FamilyResult) -> list[str]:
    """Between two runs of unequal cost, the difference at equal budgets lies between that of their final losses and
    that at the smaller budget, where one of them was not finished. Who wins is open unless the smaller of the two is
    sure."""
    if found.final is None or found.difference is None:
        return []
    if is_equal(found) and found.against == family.baseline:
        return [f"That is at equal {what} too."]
    if is_equal(found):
        sure = f" (95% interval {interval(found.final)})" if found.final.low is not None else ""
        return [f"At equal {what}, against {name(found.against)}, it is {_side(found.final.mean)}{sure}."]
    smaller, larger = sorted((found.final, found.difference), key=lambda end: abs(end.mean))
    spent = f"its runs spent {ratio(found.spent)} that of {name(found.against)}"
    if smaller.mean * larger.mean <= 0:
        return [f"Who wins at equal {what} is open: {spent}."]
    if smaller.low is None or smaller.high is None:
        return [f"Who wins at equal {what} is open: {spent}, and there is 1 pair to tell by."]
    sure = f"95% interval {interval(smaller)}"
    if smaller.low <= 0 <= smaller.high:
        return [f"Who wins at equal {what} is open: {spent}, and 0 lies in the {sure} of the smaller difference."]
    return [f"At equal {what} it is at least {_side(smaller.mean)} ({sure})."]


def _side(difference: float) -> str:
    return f"{abs(difference):.4f} {'below' if difference < 0 else 'above'}"
