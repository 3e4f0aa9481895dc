"""The main table, its costs, the seeds one by one, and every pair of rows."""

from eval.compare.judging import MOST_SEEDS
from eval.compare.numbers import COST_TITLES, NONE, cost, half_width, interval, loss, p_value, plural, ratio, signed
from eval.compare.page import Block, Bullets, Folded, Heading, Table, Text, name
from eval.compare.results import UNDECIDED, FamilyResult, GroupResult
from eval.compare.sections.words import how_judged, loss_name, with_reservations
from eval.compare.statistics import LEVEL


def loss_blocks(family: FamilyResult, comparisons: int) -> list[Block]:
    what = loss_name(family.measure)
    blocks: list[Block] = [Heading(f"Final {what}", 3), _main_table(family)]
    if family.baseline:
        blocks.append(Bullets(_main_columns(family, comparisons)))
        if judged := how_judged(family.test, name):
            blocks.append(Text(" ".join(["**How the rows were judged.**", *judged])))
    notes = [f"{name(group.label)}: {note}." for group in family.in_order for note in group.notes]
    if notes:
        blocks += [Text("**Notes on the rows**"), Bullets(notes)]
    blocks += [Heading("What it costs", 3), _cost_table(family), Bullets(_cost_columns(family))]
    blocks += [Heading("Seed by seed", 3), *_seeds(family)]
    blocks += _every_pair(family)
    blocks += _bits_per_byte(family)
    return blocks


def _main_table(family: FamilyResult) -> Table:
    """The verdict first: on a phone the other columns are out of sight."""
    columns = ["run", "loss", "seeds"]
    if family.baseline:
        columns = ["run", "verdict", "difference", "95% interval", "p", *columns[1:], "paired p", "sign test"]
    rows = [_main_row(group, family) for group in family.in_order]
    return Table("final-loss", columns, rows, words=[1] if family.baseline else ())


def _main_row(group: GroupResult, family: FamilyResult) -> list[str]:
    seeds = " + ".join([str(len(group.seeds)), *group.fates])
    row, label = [loss(group.loss), seeds], name(group.label)
    if family.baseline is None:
        return [label, *row]
    if group.label == family.baseline:
        return [label, "baseline", *[NONE] * 3, *row, NONE, NONE]
    found, paired = group.difference, group.paired
    if paired is None:
        return [label, group.verdict, *[NONE] * 3, *row, NONE, NONE]
    if group.reference:
        said = f"the baseline, {group.steps} steps"
        return [label, said, signed(paired.mean), interval(paired), NONE, *row, NONE, NONE]
    verdict = group.verdict + _why_undecided(group) + with_reservations(group, brief=True)
    judged = [verdict, signed(group.mean), interval(found), p_value(found.p if found else None)]
    return [label, *judged, *row, p_value(paired.p), p_value(paired.sign_p)]


def _why_undecided(group: GroupResult) -> str:
    found, paired = group.difference, group.paired
    if group.verdict != UNDECIDED or paired is None or paired.n < 2:
        return ""
    if not paired.sd:
        equal = "no difference in any seed" if paired.mean == 0 else "equal in all seeds: no spread to test against"
        return f" ({equal})"
    if found is None:
        return " (two seeds and no other variant to judge with)"
    return f" ({group.seeds_needed or f'over {MOST_SEEDS}'} seeds needed)" if found.p is not None else ""


def _main_columns(family: FamilyResult, comparisons: int) -> list[str]:
    base = name(family.baseline)
    return [
        "**verdict**: better or worse where 0 lies outside the interval, else “cannot tell”, which is not “no "
        "difference”. In brackets: how many seeds would show a difference as large as this one, with this spread and "
        "for as many comparisons, four times out of five. Behind “but”: what the verdict must not be read without. "
        "Rows stand in the order of their verdicts.",
        f"**difference**: the loss less that of {base}, seed by seed; below zero is better. **loss**: the mean at the "
        f"end of each run, over the seeds that {base} has too.",
        f"**95% interval**: where the true difference lies. All intervals of this report (it judges "
        f"{plural(comparisons, 'row')}) hold together with 95%, as the best of many looks good by luck. An interval "
        "with an open end: runs that diverged or failed have no loss, so nothing bounds the mean on that side.",
        f"**p**: how often seeds alone would give some row a difference as clear as this one if there were none; below "
        f"{LEVEL} where 0 lies outside the interval.",
        "**paired p**, **sign test**: of the row's own differences by themselves, corrected for nothing: the paired "
        f"t-test, and the number of seeds won, whose p cannot fall below {LEVEL} with fewer than 6 seeds.",
    ]


def _cost_table(family: FamilyResult) -> Table:
    rows = []
    for group in family.in_order:
        row = [name(group.label)]
        for key in COST_TITLES:
            found = group.costs[key]
            compared = family.baseline is not None and group.label != family.baseline and found.ratio is not None
            row.append(cost(key, found.value) + (f" ({ratio(found.ratio)})" if compared else ""))
        rows.append(row)
    titles = [*COST_TITLES.values()]
    if family.per_device:
        titles[0] = "tokens/s per device"
    return Table("cost", ["run", *titles], rows)


def _cost_columns(family: FamilyResult) -> list[str]:
    brackets = f" In brackets: as a multiple of that of {name(family.baseline)}." if family.baseline else ""
    return [
        "Means over the seeds." + brackets,
        "**tokens/s** and **step time**: the median over the logged intervals without the first tenth (compiling, "
        "warming up); they compare only between runs on equal machines that did nothing else. **peak memory**: the "
        "most that was in use on the first process's device (without a GPU: its resident memory).",
        "**FLOPs per token**: of a training step, forward and backward, counted from the shapes.",
    ]


def _seeds(family: FamilyResult) -> list[Block]:
    rows = [
        [
            name(group.label),
            NONE if pair.seed is None else str(pair.seed),
            loss(pair.loss),
            *([loss(pair.baseline), signed(pair.difference)] if family.baseline else []),
        ]
        for group in family.in_order
        for pair in group.pairs
        if group.label != family.baseline
    ]
    if not family.baseline:
        return [Table("seeds", ["run", "seed", "loss"], rows)]
    return [
        Table("seeds", ["run", "seed", "loss", "baseline's", "difference"], rows),
        Text(
            f"**baseline's**: the final loss of {name(family.baseline)} with the same seed. **difference**: loss "
            "less that."
        ),
    ]


def _every_pair(family: FamilyResult) -> list[Block]:
    if not family.every_pair:
        return []
    found = {(pair.row, pair.column): pair.difference for pair in family.every_pair}
    # How the baseline compares is said in the main table, by a better test.
    labels = [group.label for group in family.in_order if group.label != family.baseline]
    if len(labels) < 2:
        return []
    rows = []
    for row in labels:
        cells = []
        for column in labels:
            pair = found.get((row, column))
            cells.append(NONE if pair is None else f"{signed(pair.mean)}{half_width(pair)}")
        rows.append([name(row), *cells])
    controls = [group.label for group in family.groups if group.control]
    said = f" Controls here: {', '.join(map(name, controls))}." if controls else ""
    return [
        Folded(
            "Every variant against every other, such as a variant against its controls",
            [
                Text(
                    "Final loss of the row less that of the column, mean over their common seeds ± half the 95% "
                    "interval, by a paired t-test of these two, not corrected for the number of pairs. Below zero: the "
                    f"row is better.{said}"
                ),
                Table("every-pair", ["run", *(name(label) for label in labels)], rows),
            ],
        )
    ]


def _bits_per_byte(family: FamilyResult) -> list[Block]:
    if not family.bits_per_byte:
        return []
    rows = [
        [name(row.label), f"{row.bits_per_byte:.4f}"]
        + (
            [signed(row.difference.mean), interval(row.difference), plural(row.difference.n, "seed")]
            if row.difference
            else [NONE, NONE, NONE]
        )
        for row in family.bits_per_byte
    ]
    return [
        Heading("Other vocabularies, in bits per byte", 3),
        Text(
            "These runs cut the text into other tokens, so their losses per token are not comparable. Their bits "
            "per byte of held-out text are: the data sets' manifests say that it is the same text, and each run scored "
            "all of it but what fills no whole window at its end."
        ),
        Table("bits-per-byte", ["run", "bits per byte", "difference", "95% interval", "pairs"], rows),
    ]
