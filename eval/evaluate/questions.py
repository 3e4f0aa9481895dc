"""What a task's questions were worth one by one, from what the harness records of each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask, Task

ANSWER = "answer_bits_per_byte"
"""Bits per UTF-8 byte of the right answer, the space before it included; the mean over questions. It moves with every
question, where accuracy moves only with those that change sides."""

Sample = Mapping[str, Any]


def question_values(task: Task, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Metric → its value for each question, for the metrics whose mean over questions is the mark; and ``ANSWER`` where
    the task scores given answers. Metrics have the names they have among the marks."""
    values: dict[str, list[float]] = {}
    aggregation = task.aggregation()
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        answers = "" if sample["filter"] == "none" else f",{sample['filter']}"
        for metric in sample["metrics"]:
            if aggregation.get(metric) is mean and isinstance(sample[metric], int | float):
                values.setdefault(f"{metric}{answers}", []).append(float(sample[metric]))
        if (bits := _answer_bits(task, sample)) is not None:
            values.setdefault(ANSWER, []).append(bits)
    # A value that some question lacks belongs to no mean over all of them.
    questions = len({sample["doc_id"] for sample in samples})
    return {metric: np.array(numbers) for metric, numbers in values.items() if len(numbers) == questions}


def _answer_bits(task: Task, sample: Sample) -> float | None:
    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE not in ("multiple_choice", "loglikelihood"):
        return None
    index = 0 if task.OUTPUT_TYPE == "loglikelihood" else _right_answer(task, sample["doc"])
    if index is None:
        return None
    answer, (nats, _) = sample["arguments"][index][1], sample["filtered_resps"][index]
    return -nats / math.log(2) / len(answer.encode())


def _right_answer(task: ConfigurableTask, doc: Mapping[str, Any]) -> int | None:
    """The number of the right answer; the first of several; None where the task's data name none."""
    right = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(right, list):
        right = right[0] if right else None
    choices = task.doc_to_choice(doc)
    if isinstance(right, str):
        right = choices.index(right) if right in choices else None
    return right if isinstance(right, int) and 0 <= right < len(choices) else None
