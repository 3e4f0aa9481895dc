"""Marks in downstream tasks."""

from eval.compare.numbers import NONE, interval, signed
from eval.compare.page import Block, Bullets, Heading, Table, name
from eval.compare.results import FamilyResult, TaskRow


def task_blocks(family: FamilyResult) -> list[Block]:
    """Nothing where no run has marks."""
    if not family.tasks:
        return []
    columns = ["run", "task", "metric", "questions", "seeds", "score", "standard error"]
    explained = [
        "What `depth eval RUN --tasks …` measured at the end of each run, by lm-evaluation-harness; rows appear for "
        "the runs that it was called for. **score**: the mean over the seeds, by the task's own metric. **standard "
        "error**: the task's own, of the score of one run (mean over the seeds): how far another draw of as many "
        "questions would move it. All runs answer the same questions, so it does not shrink with the seeds.",
    ]
    if family.baseline:
        columns += ["difference", "95% interval"]
        explained.append(
            f"**difference**: the mean over the seeds of this score less that of {name(family.baseline)} with the same "
            "seed, over as many questions; for most metrics above zero is better, not for a perplexity. **95% "
            "interval**: by Student's t over the seeds. It holds for these questions, and is corrected neither for the "
            "number of tasks nor for that of variants: of twenty rows without any difference, one will look sure."
        )
    return [
        Heading("Downstream tasks", 3),
        Table("tasks", columns, [_row(row, family.baseline) for row in family.tasks]),
        Bullets(explained),
    ]


def _row(row: TaskRow, baseline: str | None) -> list[str]:
    asked = NONE if row.questions is None else f"{row.questions:,}"
    cells = [name(row.label), name(row.task), name(row.metric), asked + _precision(row), str(row.runs)]
    cells += [f"{row.score:.4f}", NONE if row.standard_error is None else f"{row.standard_error:.4f}"]
    if baseline is None:
        return cells
    if row.label == baseline:
        return [*cells, "baseline", NONE]
    found = row.difference
    return [*cells, signed(found.mean) if found else NONE, interval(found)]


def _precision(row: TaskRow) -> str:
    return "" if row.precision == "fp32" else f" ({row.precision})"
