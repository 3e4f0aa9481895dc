"""At equal budgets, and how much sooner the baseline's loss is reached."""

from eval.compare.numbers import NONE, UNITS, amount, interval, loss, plural, ratio, signed
from eval.compare.page import Block, Bullets, Heading, Table, Text, name
from eval.compare.results import AtEqual, FamilyResult, GroupResult, Reach
from eval.compare.run import AXES


def budget_blocks(family: FamilyResult) -> list[Block]:
    if family.baseline is None:
        return _memory(family)
    others = [group for group in family.in_order if group.at_equal]
    if not others:
        return []
    blocks: list[Block] = [Heading("At equal budgets", 3)]
    for axis in AXES:
        blocks += [Text(f"**At equal {UNITS[axis]}**"), _equal_table(others, axis)]
    blocks.append(
        Bullets(
            [
                "**against**: the baseline, or the baseline's model trained for another length, whichever cost "
                "most nearly the same. **spent**: what the row's whole runs cost, as a multiple of what that one's "
                "did. **final difference**: of the final losses; against the baseline this and its interval are those "
                "of the main table. Where spent is 1.00×, this is the comparison at equal budgets.",
                "**at the budget**: the same difference at the largest budget that all runs reached. Losses are "
                "read off the curves, as straight lines between measurements over the logarithm of the budget, "
                "never before the first measurement or behind the last. **read at**: how far into its own training "
                "each was there, the row first; in brackets the learning rate at that point as a share of its "
                "peak. Its interval is that of a paired t-test of the row alone, corrected for nothing.",
                "A loss inside a run is **not** the final loss of a shorter run: the learning rate falls towards "
                "the end, and much of the gain comes then. So where spent is not 1.00×, **at the budget** is too "
                "hard on the run that was cut short and **final difference** too kind to the one that spent more; "
                "the truth lies between them, and a run planned for that budget (a study's wall_clock control) "
                "would tell.",
            ]
        )
    )
    return [*blocks, *_memory(family), *_reach_blocks(family, others)]


def _equal_table(groups: list[GroupResult], axis: str) -> Table:
    columns = [
        "run",
        "against",
        "spent",
        "final difference",
        "95% interval",
        "at the budget",
        "95% interval",
        "read at",
    ]
    rows = []
    for group in groups:
        found = group.at_equal[axis]
        against = NONE if found.against is None else name(found.against)
        cells = [name(group.label), against, ratio(found.spent)]
        cells += [signed(found.final.mean), interval(found.final)] if found.final else [NONE, NONE]
        if found.difference is None:
            rows.append([*cells, NONE, NONE, found.why_not or NONE])
        else:
            at_budget = f"{signed(found.difference.mean)} at {amount(axis, found.budget)}"
            rows.append([*cells, at_budget, interval(found.difference), _read_at(found)])
    return Table(f"equal-{axis}", columns, rows)


def _read_at(found: AtEqual) -> str:
    def one(share: float | None, rate: float | None) -> str:
        said = NONE if share is None else f"{100 * share:.0f}%"
        return said if rate is None else f"{said} (lr {100 * rate:.0f}%)"

    own, base = one(found.read_at, found.learning_rate), one(found.baseline_read_at, found.baseline_learning_rate)
    return f"{own}, {base}"


def _memory(family: FamilyResult) -> list[Block]:
    if not family.memory:
        return []
    rows = [
        [f"{row.gib:.3g} GiB", name(row.best), loss(row.best_loss), ", ".join(map(name, row.added))]
        for row in family.memory
    ]
    return [
        Text("**At equal memory**"),
        Table("equal-memory", ["memory budget", "best that fits", "its loss", "fits from here on"], rows),
        Bullets(
            [
                "Each line takes one row's peak memory as the budget and gives the lowest mean final loss among "
                "all rows that need no more; the main table says whether that is more than luck. Budgets rise; a "
                "line whose best is the same as above buys nothing with its memory. Memory is as these runs were "
                "set up: a smaller micro-batch or activation checkpointing trades it for time."
            ]
        ),
    ]


def _reach_blocks(family: FamilyResult, groups: list[GroupResult]) -> list[Block]:
    rows = [[name(group.label), *(_reach(group.reach.get(axis)) for axis in AXES)] for group in groups]
    return [
        Heading("How much sooner the baseline's final loss is reached", 3),
        Table("reached", ["run", "tokens", "FLOPs", "time"], rows),
        Text(
            f"What {name(family.baseline)} spent on its whole run, divided by what the row had spent when its curve "
            "first came down to the baseline's final loss of the same seed (straight lines between measurements "
            "over the logarithm of the budget); geometric mean over the seeds. 1.25× means: with 1/1.25 = 80% of "
            "the budget. Most curves fall steeply at their very end, when the learning rate does, so this "
            "understates what a shorter run that was planned as such would save. “At least” where a run was there "
            "at its first measurement."
        ),
    ]


def _reach(found: Reach | None) -> str:
    if found is None:
        return "not logged"
    if found.speed_up is None:
        reached = sum(value is not None for value in found.per_seed)
        return f"reached by {reached} of {plural(len(found.per_seed), 'seed')}" if reached else "not reached"
    return ("at least " if found.at_least else "") + ratio(found.speed_up)
