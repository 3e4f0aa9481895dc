"""Marks in downstream tasks, as EleutherAI's lm-evaluation-harness gives them.

Everything about a task (its data, its prompts, what counts as right) is the harness's; a suite sets some keys of it.
What a task draws at random, such as the examples in front of a question, is drawn with the seeds of the harness's own
command: the same questions every time, on every process, and as there.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from eval.evaluate.harness import HarnessModel
from eval.evaluate.offline import go_offline_if_unreachable
from eval.evaluate.questions import ANSWER, question_values
from eval.evaluate.shares import Shares, difference, mean_of, shifted, total, weighted
from eval.evaluate.suites import SUITES, Suite
from torchtitan_ext.errors import UserError, nearest

CANNOT = {"UNSAFE_CODE": "runs code that the model writes", "MULTIMODAL": "shows the model more than text"}
"""Flags that the harness sets on a task → what ``depth eval`` does not do."""
CENTRED = "centred_mean"
"""The mark of a suite: (score − chance) / (1 − chance), 0 for guesses and 1 for no mistake; its mean over the tasks."""

Marks = dict[str, dict[str, Any]]
"""Task → metric → value, and beside it ``metric_stderr``."""


@dataclass
class Outcome:
    """What one model achieved: its ``marks``, and of those that are means over questions their shares."""

    marks: Marks = field(default_factory=dict)
    shares: dict[str, dict[str, Shares]] = field(default_factory=dict)

    def against(self, other: "Outcome") -> Marks:
        """Task → metric → ``difference`` from another model's marks, and its paired ``standard_error``."""
        return {
            task: {
                metric: dict(zip(("difference", "standard_error"), total(difference(mine, theirs)), strict=True))
                for metric, mine in metrics.items()
                if (theirs := other.shares.get(task, {}).get(metric)) is not None
            }
            for task, metrics in self.shares.items()
            if metrics
        }


class Tasks:
    """Tasks and perhaps a suite that are loaded, with what they draw at random still to be drawn."""

    def __init__(self, tasks: Sequence[str], *, suite: str | None = None, folder: str | None = None) -> None:
        """``folder`` holds further task files (YAML).

        Raises:
            UserError: the harness knows no such task, cannot load it or lacks a package for it; or it cannot be done
                here.
        """
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        self.names = tuple(tasks)
        self.suite = suite
        wanted = [*tasks, *(task.task for task in SUITES[suite].tasks)] if suite else list(tasks)
        manager, offline = _manager(wanted, folder)
        # As `lm_eval.simple_evaluate` seeds: before the tasks are loaded, and not again before they draw.
        random.seed(DEFAULT_RANDOM_SEED)
        np.random.seed(DEFAULT_OTHER_SEED)
        self.loaded = _load(manager, list(tasks), f"--tasks {' '.join(tasks)}", offline) if tasks else None
        self.suite_loaded: list[dict[str, Any]] = []
        for one in SUITES[suite].tasks if suite else ():
            # The harness sets keys of a task it knows only inside a group of ours, and of a group's tasks only shots.
            is_group = one.task in manager.all_groups
            spec = one.task if is_group else {"group": f"{suite}/{one.label}", "task": [one.spec()]}
            loaded = _load(manager, [spec], f"--suite {suite}: {one.task}", offline)["tasks"]
            for task in loaded.values() if is_group else ():
                task.set_config(key="num_fewshot", value=one.shots)
            self.suite_loaded.append(loaded)
        self._drawn = random.getstate(), np.random.get_state()

    def run(self, model: HarnessModel, limit: int | None) -> Outcome:
        """Ask ``model``; of each task ``limit`` questions. Collective. Every run asks the same questions.

        Raises:
            UserError: a metric lacks a package.
        """
        random.setstate(self._drawn[0])
        np.random.set_state(self._drawn[1])
        outcome = Outcome()
        if self.loaded is not None:
            marks, shares = _ask(model, self.loaded, limit, f"--tasks {' '.join(self.names)}")
            for name, task_marks in marks.items():
                outcome.marks[name] = task_marks
                outcome.shares[name] = shares.get(name, {})
                if ANSWER in outcome.shares[name]:
                    task_marks |= _mark(ANSWER, outcome.shares[name][ANSWER])
        if self.suite is not None:
            results = [_ask(model, {"tasks": tasks}, limit, f"--suite {self.suite}")[1] for tasks in self.suite_loaded]
            _add_suite(outcome, self.suite, SUITES[self.suite], results)
        if model.bos:
            # Another question than without, so another name: `depth compare` compares marks of one name.
            outcome.marks = {f"{name}+bos": marks for name, marks in outcome.marks.items()}
            outcome.shares = {f"{name}+bos": shares for name, shares in outcome.shares.items()}
        return outcome


def _add_suite(outcome: Outcome, name: str, suite: Suite, results: Sequence[dict[str, dict[str, Shares]]]) -> None:
    """Put the marks of a suite's tasks into ``outcome``, and its own. ``results``: for each of its tasks the harness's
    tasks it consists of → metric → shares; their mean counts."""
    centred: list[tuple[float, Shares]] = []
    bits: list[tuple[float, Shares]] = []
    for task, parts in zip(suite.tasks, results, strict=True):
        means = {
            metric: weighted([(1 / len(parts), shares[metric]) for shares in parts.values()])
            for metric in (task.metric, ANSWER)
            if all(metric in shares for shares in parts.values())
        }
        _add(outcome, f"{name}/{task.label}", means)
        centred.append((1 / (1 - task.chance), shifted(means[task.metric], -task.chance)))
        bits += [(1.0, means[ANSWER])] if ANSWER in means else []
    means = {
        metric: weighted([(weight / len(terms), shares) for weight, shares in terms])
        for metric, terms in ((CENTRED, centred), (ANSWER, bits))
        if terms
    }
    _add(outcome, name, means)


def _add(outcome: Outcome, name: str, means: dict[str, Shares]) -> None:
    outcome.shares[name] = means
    outcome.marks[name] = {"sample_len": sum(map(len, next(iter(means.values())).values()))}
    for metric, shares in means.items():
        outcome.marks[name] |= _mark(metric, shares)


def _mark(metric: str, shares: Shares) -> dict[str, float]:
    value, error = total(shares)
    return {metric: value} if error is None else {metric: value, f"{metric}_stderr": error}


def _ask(
    model: HarnessModel, loaded: dict[str, Any], limit: int | None, what: str
) -> tuple[Marks, dict[str, dict[str, Shares]]]:
    """The harness's marks, and task → metric → shares for what is a mean over questions."""
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    try:
        results = evaluate(model, loaded, limit=limit, log_samples=True, bootstrap_iters=1000)
    except ImportError as error:  # Some metrics import what they need when they are first used.
        raise UserError(f"{what}: {_line(error)}; install what is missing") from error
    marks = {
        name: {key.removesuffix(",none"): value for key, value in own.items() if key != "alias"}
        for name, own in results["results"].items()
    }
    shares = {
        name: {
            metric: mean_of(name, values)
            for metric, values in question_values(task, results["samples"].get(name, [])).items()
        }
        for name, task in loaded["tasks"].items()
    }
    return marks, shares


def _load(manager: TaskManager, specs: list[Any], what: str, offline: str | None) -> dict[str, Any]:
    """Tasks and groups of tasks by their names, or by their settings."""
    try:
        loaded = manager.load(specs)
    except Exception as error:  # A task is code as well as data, and may fail in any way.
        if offline is not None and isinstance(error, OSError):
            raise UserError(
                f"{what}: its data are not on this machine and cannot be fetched ({offline}); run the same command "
                "where there is a network, with HF_HOME set to a folder, and use that folder here"
            ) from error
        hint = "install what is missing" if isinstance(error, ImportError) else "put that right, or leave the task out"
        raise UserError(f"cannot load {what}: {_line(error)}; {hint}") from error
    for name, task in loaded["tasks"].items():
        for flag, why in CANNOT.items():
            if getattr(task, flag, False):
                raise UserError(f"--tasks: {name} {why}, which depth eval does not; leave it out")
    return loaded


def _manager(tasks: Sequence[str], folder: str | None) -> tuple[TaskManager, str | None]:
    """One that knows all of ``tasks``, and why their data cannot be fetched, if so. To know the harness's own takes
    seconds, so those in ``folder`` come first."""
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager, None
    manager = TaskManager(include_path=folder)
    check_names(tasks, manager.all_tasks)
    return manager, go_offline_if_unreachable()


def check_names(tasks: Sequence[str], known: Sequence[str]) -> None:
    """Raise ``UserError`` for a task whose name is not among those of the ``known`` tasks and groups."""
    for name in tasks:
        if name not in known:
            alike = [other for other in known if name and other[0] == name[0]]
            raise UserError(
                f"--tasks {name or repr(name)}: neither lm-evaluation-harness nor --task-folder has such a task; "
                f"{nearest(name, alike or ['hellaswag'])}"
            )


def _line(error: Exception) -> str:
    """The first line of a message; of an error without one, its name."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
