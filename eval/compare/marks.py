"""What ``depth eval --tasks`` found out about a run: ``RUN/eval/*.json`` → its marks in downstream tasks."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eval.compare.run import Mark

FOLDER = "eval"
FORMAT = 1
_COUNTS = ("sample_len", "samples")
"""What a task's entry says beside its marks."""


def read_marks(folder: Path, step: int) -> tuple[tuple[Mark, ...], list[str]]:
    """The marks of a run at ``step``, and notes on files that could not be read.

    Files are known by what is in them, not by their names. Of several with one task the newest counts.
    """
    by_task: dict[str, tuple[Mark, ...]] = {}
    notes = []
    for file in _oldest_first(folder / FOLDER):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if "tasks" not in content or content["step"] != step:
                continue
            if content["format"] != FORMAT:
                raise ValueError(f"format {content['format']}, this version reads format {FORMAT}")
            precision = str(content["precision"])
            found = {str(task): tuple(_marks(str(task), marks, precision)) for task, marks in content["tasks"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"{FOLDER}/{file.name} is damaged and was not used ({error!r})")
            continue
        by_task |= {task: marks for task, marks in found.items() if marks}
    return tuple(mark for marks in by_task.values() for mark in marks), notes


def _oldest_first(folder: Path) -> list[Path]:
    """A folder that is not there or may not be read has none."""
    try:
        return sorted(folder.glob("*.json"), key=lambda file: (file.stat().st_mtime_ns, file.name))
    except OSError:
        return []


def _marks(task: str, entry: Mapping[str, Any], precision: str) -> Iterator[Mark]:
    """One for each metric: ``acc``, ``exact_match,strict-match``, with ``acc_stderr``, ``exact_match_stderr,…``."""
    questions = entry.get("sample_len")
    for metric, value in entry.items():
        measure, comma, answers = metric.partition(",")
        if measure.endswith("_stderr") or metric in _COUNTS or not _is_number(value):
            continue
        error = entry.get(f"{measure}_stderr{comma}{answers}")
        yield Mark(
            task=task,
            metric=metric,
            questions=questions if isinstance(questions, int) else None,
            precision=precision,
            score=float(value),
            standard_error=float(error) if error is not None and _is_number(error) else None,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
