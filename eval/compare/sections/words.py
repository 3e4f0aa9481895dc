"""Words that several sections, and the console, share."""

from collections.abc import Callable

from eval.compare.numbers import p_value, plural
from eval.compare.results import AtEqual, GroupResult, Results, Test
from eval.compare.sweeps import without_rate

WHOLE = 0.98
"""A loss read at this share of a run or later is taken for its final one."""


def loss_name(measure: str) -> str:
    """What the losses of a family are called."""
    return "held-out loss" if measure == "heldout" else "training loss"


def is_equal(found: AtEqual) -> bool:
    """Whether both whole runs cost the same, so that their final losses are the comparison."""
    return found.spent is not None and WHOLE <= found.spent <= 1 / WHOLE


def with_reservations(group: GroupResult, brief: bool = False) -> str:
    """What follows a verdict: nothing, or what it must not be read without."""
    said = [one.short if brief else one.long for one in group.reservations]
    return f", but: {'; '.join(said)}" if said else ""


def how_judged(test: Test | None, call: Callable[[str], str]) -> list[str]:
    """How the rows of a family were judged, in sentences; ``call`` writes down a label."""
    if test is None:
        return []
    said = []
    if test.pooled:
        arms = plural(len(test.pooled) + 1, "arm")
        said.append(
            f"{_are(test.pooled, call)} judged together: seeds are blocks, the errors of {arms} are pooled (standard "
            f"deviation {test.spread:.4f}, {plural(test.degrees or 0, 'degree')} of freedom), and Dunnett's test "
            "compares each variant with the baseline."
        )
        if not test.complete:
            said.append("Runs are missing, so these differences are those of a least-squares fit to the others.")
        if not test.exact:
            said.append(
                "Their critical value is an upper bound (Šidák), as the missing runs leave no simple exact one."
            )
    for label, p in test.set_aside.items():
        said.append(
            f"The errors of {call(label)} vary too much to be pooled with those of the others (p {_equals(p)} that all "
            "vary alike)."
        )
    if test.paired:
        said.append(
            f"{_are(test.paired, call)} judged by a paired t-test {'each' if len(test.paired) > 1 else 'alone'}."
        )
    return said


def without_rows(results: Results, call: Callable[[str], str]) -> list[str]:
    """Arms of which no run has a final loss as one diverged, in sentences."""
    rows = {
        (name, family.size) for family in results.families for row in family.groups for name in (row.label, row.variant)
    }
    arms: dict[tuple[str, str | None], list[bool]] = {}
    for out in results.left_out:
        arm = without_rate(out["label"]), out["size"]
        if arm[0] is not None and arm not in rows and out["fate"]:
            arms.setdefault((arm[0], arm[1]), []).append(out["diverged"])
    return [
        f"{call(label)} has no row: {sum(diverged)} of its {plural(len(diverged), 'run')} diverged, none has a final "
        "loss."
        for (label, _), diverged in arms.items()
        if any(diverged)
    ]


def _equals(p: float) -> str:
    said = p_value(p)
    return said if said.startswith("<") else f"= {said}"


def _are(labels: list[str], call: Callable[[str], str]) -> str:
    *rest, last = map(call, labels)
    return f"{', '.join(rest)} and {last} are" if rest else f"{last} is"
