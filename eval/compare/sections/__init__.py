"""Results → blocks of the report. Every table is followed by what its columns mean."""

import re
from collections.abc import Sequence
from dataclasses import replace

from eval.compare.page import Block, Bullets, Folded, Heading, Page, Table, Text, Warning, name
from eval.compare.results import FamilyResult, Results
from eval.compare.sections.budgets import budget_blocks
from eval.compare.sections.depth import depth_blocks
from eval.compare.sections.drawn import picture_blocks
from eval.compare.sections.first import first_blocks
from eval.compare.sections.losses import loss_blocks
from eval.compare.sections.scaling import scaling_blocks
from eval.compare.sections.sweeps import sweep_blocks
from eval.compare.sections.tasks import task_blocks
from eval.compare.sections.words import without_rows


def report(results: Results) -> Page:
    """The answer first, then every number."""
    alone = len(results.families) == 1
    blocks: list[Block] = [*_warnings(results), *first_blocks(results), Text(_opening(results))]
    for number, family in enumerate(results.families):
        found = _family_blocks(family, f"f{number}", results)
        blocks += found if alone else _tables_named(found, family.size or f"{number + 1}")
    blocks += scaling_blocks(results.scaling)
    blocks += _left_out(results)
    return Page("Which replacement of the residual connection helps, and at what price", blocks)


def _opening(results: Results) -> str:
    return (
        f"{_subject(results)} **Loss** is the mean negative log-likelihood of a token, in nats: lower is better; "
        "**held-out** loss is that of text kept out of training. A **seed** fixes the initial weights and the "
        "order of the data, so two runs of one seed began alike and saw the same batches; differences are taken "
        "seed by seed. `results.json` has all numbers in full; `tables/` has every table as CSV and LaTeX, `pictures/` "
        "every picture as SVG."
    )


def _warnings(results: Results) -> list[Block]:
    blocks: list[Block] = []
    diverged = [f"{name(out['name'])} ({out['why']})" for out in results.left_out if out["diverged"]]
    if diverged:
        blocks.append(Warning(f"Diverged, and so without a final loss: {'; '.join(diverged)}."))
    return blocks + [Warning(sentence) for sentence in without_rows(results, name)]


def _tables_named(blocks: Sequence[Block], size: str) -> list[Block]:
    """The files of these tables begin with the size."""
    found: list[Block] = []
    for block in blocks:
        if isinstance(block, Table):
            found.append(replace(block, file=f"{re.sub(r'[^A-Za-z0-9.]+', '_', size)}-{block.file}"))
        elif isinstance(block, Folded):
            found.append(replace(block, blocks=_tables_named(block.blocks, size)))
        else:
            found.append(block)
    return found


def _subject(results: Results) -> str:
    """What is compared, as far as the runs' own files say how they were trained."""
    variants = [group for family in results.families for group in family.groups if group.at_equal]
    if any(family.data is None for family in results.families):
        return "Language models are compared with a baseline."
    if any(group.unlike for group in variants):
        return (
            "Language models that differ in their residual connection are compared with a baseline. Some differ from "
            "it in how they were trained, too; what is said of each of them names these differences."
        )
    return (
        "Language models that differ in their residual connection were trained alike and are compared with a baseline."
    )


def _family_blocks(family: FamilyResult, key: str, results: Results) -> list[Block]:
    size = f", size {family.size}" if family.size else ""
    title = f"Against {family.baseline}{size}" if family.baseline else f"Without a baseline{size}"
    blocks: list[Block] = [Heading(title)]
    blocks += loss_blocks(family, results.comparisons)
    blocks += sweep_blocks(family, key)
    blocks += task_blocks(family)
    blocks += budget_blocks(family)
    blocks += picture_blocks(family, key)
    blocks += depth_blocks(family, key)
    if family.data:
        said = "; ".join(f"{what} {name(value)}" for what, value in family.data.items())
        blocks += [Heading("The data", 3), Text(f"All of these runs agree in: {said}. Runs that do not are left out.")]
    return blocks


def _left_out(results: Results) -> list[Block]:
    blocks: list[Block] = [Heading("Left out")]
    if not results.left_out:
        return [*blocks, Text("Nothing: every run that was given is in the tables above.")]
    return [
        *blocks,
        Text("These were given and are in no table above. They change no number there."),
        Bullets([f"{name(out['name'])}: {out['why']}." for out in results.left_out]),
    ]
