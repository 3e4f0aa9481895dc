"""The first screen: differences beside what they cost, variants by sizes, sentences, and where the runs come from."""

from dataclasses import replace

from eval.compare.forest import forest_picture
from eval.compare.grouping import without_size
from eval.compare.numbers import NONE, signed
from eval.compare.page import Block, Heading, Picture, Pictures, Table, Text, Warning, name
from eval.compare.provenance import said
from eval.compare.results import FamilyResult, GroupResult, Results
from eval.compare.sections.short import short_blocks
from eval.compare.sections.words import loss_name


def first_blocks(results: Results) -> list[Block]:
    blocks: list[Block] = []
    pictures = [
        Picture(f"f{number}-forest", svg, _caption(family))
        for number, family in enumerate(results.families)
        if (svg := forest_picture(family)) is not None
    ]
    if pictures:
        blocks += [Pictures(pictures), Text(_explained())]
    return [*blocks, *_matrix(results), *_words(results), *_provenance(results)]


def _caption(family: FamilyResult) -> str:
    what = loss_name(family.measure)
    size = f" at size {name(family.size)}" if family.size else ""
    return f"Final {what}{size} less that of {name(family.baseline)}."


def _explained() -> str:
    return (
        "A bar is the 95% interval of a difference; all of them hold together. A triangle that points down: "
        "**better**, as 0 lies outside; up: **worse**; a circle: **cannot tell**. An arrow is an open end. The columns "
        "are speed and peak memory as multiples of the baseline's. “But”: what the verdict must not be read "
        "without is said below."
    )


def _words(results: Results) -> list[Block]:
    """A sentence for each variant, behind what a reader must know before."""
    blocks: list[Block] = []
    for family in results.families:
        blocks += [Warning(warning) for warning in family.warnings]
        size = f", size {family.size}" if len(results.families) > 1 and family.size else ""
        blocks += [
            replace(block, text=f"{block.text}{size}") if isinstance(block, Heading) else block
            for block in short_blocks(family)
        ]
    return blocks


def _matrix(results: Results) -> list[Block]:
    """Variants by sizes, where there are several."""
    families = [family for family in results.families if family.baseline is not None and len(family.groups) > 1]
    if len(families) < 2:
        return []
    titles = [name(family.size) if family.size else f"against {name(family.baseline)}" for family in families]
    cells = [{_title(group, family): group for group in family.in_order} for family in families]
    labels = dict.fromkeys(
        label
        for by_title, family in zip(cells, families, strict=True)
        for label in by_title
        if not _base(label, family)
    )
    rows = [[name(label), *(_cell(by_title.get(label)) for by_title in cells)] for label in labels]
    return [
        Heading("Variants by size", 2),
        Table("variants-by-size", ["run", *titles], rows, range(1, len(titles) + 1)),
        Text(
            "The verdict, and the difference of the final losses; below zero is better. Rows stand in the order of the "
            "verdicts at the first size."
        ),
    ]


def _title(group: GroupResult, family: FamilyResult) -> str:
    return without_size(group.label, family.size)


def _base(label: str, family: FamilyResult) -> bool:
    return family.baseline is not None and label == without_size(family.baseline, family.size)


def _cell(group: GroupResult | None) -> str:
    if group is None or group.mean is None:
        return NONE
    but = ", but…" if group.reservations else ""
    return f"{group.verdict or 'baseline'}{but} {signed(group.mean)}"


def _provenance(results: Results) -> list[Block]:
    keys = list(dict.fromkeys(key for family in results.families for key in family.provenance))
    by_key = {key: [said(family.provenance.get(key, [])) for family in results.families] for key in keys}
    titles = [name(family.size) if family.size else "value" for family in results.families]
    if all(len(set(cells)) == 1 for cells in by_key.values()):
        titles, by_key = ["value"], {key: cells[:1] for key, cells in by_key.items()}
    rows = [[key, *(name(cell) for cell in cells)] for key, cells in by_key.items()]
    return [
        Heading("Where these runs come from", 2),
        Table("provenance", ["what", *titles], rows, range(1, len(titles) + 1)),
        Text("As the run folders say: `code.txt`, `run.yaml` and, for a study, `study.json`."),
    ]
