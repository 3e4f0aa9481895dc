"""Marks of a family's runs in downstream tasks → rows of the report."""

from collections.abc import Sequence

import numpy as np

from eval.compare.grouping import Family, Group
from eval.compare.results import TaskRow
from eval.compare.run import Mark, Run
from eval.compare.statistics import estimate

Asked = tuple[str, str, int | None, str]
"""What must agree before two marks may be compared: task, metric, number of questions, precision."""


def task_rows(family: Family) -> list[TaskRow]:
    """By task, and in each by metric, the rows of the family. Marks do not depend on how text is cut into tokens."""
    groups = [*family.all, *family.other_tokens]
    asked = {_asked(mark): None for group in groups for run in group.runs for mark in run.marks}
    by_task = sorted(asked, key=lambda one: one[0])  # a task's metrics stay in its own order
    return [row for one in by_task for group in groups if (row := _row(one, group, family.baseline)) is not None]


def _asked(mark: Mark) -> Asked:
    return mark.task, mark.metric, mark.questions, mark.precision


def _mark(run: Run, asked: Asked) -> Mark | None:
    return next((mark for mark in run.marks if _asked(mark) == asked), None)


def _row(asked: Asked, group: Group, base: Group | None) -> TaskRow | None:
    marks = [mark for run in group.runs if (mark := _mark(run, asked)) is not None]
    if not marks:
        return None
    errors = [mark.standard_error for mark in marks if mark.standard_error is not None]
    pairs = [] if base is None or group is base else group.paired_with(base)
    differences = _differences(pairs, asked)
    return TaskRow(
        label=group.label,
        task=asked[0],
        metric=asked[1],
        questions=asked[2],
        precision=asked[3],
        runs=len(marks),
        score=float(np.mean([mark.score for mark in marks])),
        standard_error=float(np.mean(errors)) if len(errors) == len(marks) else None,
        difference=estimate(differences) if differences else None,
    )


def _differences(pairs: Sequence[tuple[Run, Run]], asked: Asked) -> list[float]:
    both = [(_mark(run, asked), _mark(other, asked)) for run, other in pairs]
    return [mine.score - theirs.score for mine, theirs in both if mine and theirs]
