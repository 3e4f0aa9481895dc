"""Sets of downstream tasks for small models: which tasks, how many examples in front, what chance is.

A suite is a list of settings over lm-evaluation-harness's own tasks. Data and, where nothing else is said here, the
form of a question are the harness's. docs/evaluation.md says how each differs from the publication it is named after.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SuiteTask:
    """One task of a suite.

    Attributes:
        task: its name in the harness, or that of a group there, of whose tasks the mean counts.
        shots: how many answered questions stand in front of each question.
        metric: which of the harness's counts: ``acc`` by the likelihood of an answer, ``acc_norm`` by it per character,
            ``acc_mutual_info`` by its ratio to the likelihood of the answer without the question.
        chance: ``metric`` of a guess.
        settings: further keys of the harness's task file to set; none for a group.
    """

    task: str
    shots: int
    metric: str
    chance: float
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.task}@{self.shots}"

    def spec(self) -> dict[str, Any]:
        """A task's keys for ``lm_eval.tasks.TaskManager.load``: its own, but for these."""
        # Some tasks give ``acc`` whatever is listed.
        metrics = [
            {"metric": metric, "aggregation": "mean", "higher_is_better": True}
            for metric in dict.fromkeys(("acc", self.metric))
        ]
        return {"task": self.task, "num_fewshot": self.shots, "metric_list": metrics, **self.settings}


@dataclass(frozen=True)
class Suite:
    """``tasks`` of equal weight; ``summary`` says what they are."""

    summary: str
    tasks: tuple[SuiteTask, ...]


# Answers as text rather than as letters: models of these sizes do not know what the letters stand for.
_QUESTION = "Question: {{question}}\nAnswer:"
_COMMONSENSE = {
    "doc_to_text": _QUESTION,
    "doc_to_choice": "{{choices.text}}",
    "doc_to_target": "{{choices.label.index(answerKey)}}",
}
_DRAWN = {"fewshot_split": "train"}
"""Examples drawn anew for each question, with the harness's seed."""
_FIRST = {"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
"""The first examples, the same in front of every question."""
_LSAT = {"doc_to_target": "{{gold[0]}}", "fewshot_split": "test"}
"""Its data are one split. The harness's file gives the answer as a list of one, of which it cannot make an example."""

BOOLQ_MAJORITY = 0.62
"""The share of the more frequent answer, which DCLM takes as chance."""

SUITES: dict[str, Suite] = {
    "core": Suite(
        "the multiple-choice tasks of DCLM's CORE and LAMBADA, with its numbers of examples and its chance levels",
        (
            SuiteTask("hellaswag", 0, "acc_norm", 0.25),
            SuiteTask("hellaswag", 10, "acc_norm", 0.25, _DRAWN),
            SuiteTask("arc_easy", 10, "acc_norm", 0.25, _DRAWN),
            SuiteTask("arc_challenge", 10, "acc_norm", 0.25, _DRAWN),
            SuiteTask("copa", 0, "acc", 0.5),
            SuiteTask("commonsense_qa", 10, "acc_norm", 0.2, {**_COMMONSENSE, **_DRAWN}),
            SuiteTask("piqa", 10, "acc_norm", 0.5, _DRAWN),
            SuiteTask("openbookqa", 0, "acc_norm", 0.25),
            SuiteTask("lambada_openai", 0, "acc", 0.0),
            SuiteTask("wsc273", 0, "acc", 0.5),
            SuiteTask("winogrande", 0, "acc", 0.5),
            SuiteTask("agieval_lsat_ar", 3, "acc_norm", 0.2, _LSAT),
            SuiteTask("boolq", 10, "acc", BOOLQ_MAJORITY, _DRAWN),
        ),
    ),
    "olmes": Suite(
        "the ten tasks of OLMES in its cloze form with 5 examples and its ways to compare answers",
        (
            SuiteTask("arc_challenge", 5, "acc_mutual_info", 0.25, _FIRST),
            SuiteTask("arc_easy", 5, "acc_norm", 0.25, _FIRST),
            SuiteTask("boolq", 5, "acc", 0.5, _FIRST),
            SuiteTask("commonsense_qa", 5, "acc_mutual_info", 0.2, {**_COMMONSENSE, **_FIRST}),
            SuiteTask("hellaswag", 5, "acc_norm", 0.25, _FIRST),
            SuiteTask("mmlu_continuation", 5, "acc_norm", 0.25),
            SuiteTask("openbookqa", 5, "acc_mutual_info", 0.25, _FIRST),
            SuiteTask("piqa", 5, "acc_norm", 0.5, _FIRST),
            SuiteTask("social_iqa", 5, "acc_norm", 1 / 3, _FIRST),
            SuiteTask("winogrande", 5, "acc", 0.5, _FIRST),
        ),
    ),
}
