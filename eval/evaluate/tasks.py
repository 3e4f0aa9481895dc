"""Marks in downstream tasks, as EleutherAI's lm-evaluation-harness gives them.

Everything about a task (its data, its prompts, what counts as right) is the harness's. What a task draws at random,
such as the examples in front of a question, is drawn with the seeds of the harness's own command: the same questions
every time, on every process, and as there.
"""

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from eval.evaluate.harness import HarnessModel
from torchtitan_ext.errors import UserError, nearest

CANNOT = {"UNSAFE_CODE": "runs code that the model writes", "MULTIMODAL": "shows the model more than text"}
"""Flags that the harness sets on a task → what ``depth eval`` does not do."""


def run_tasks(
    model: HarnessModel, tasks: Sequence[str], *, folder: str | None, limit: int | None
) -> dict[str, dict[str, Any]]:
    """The marks of ``model`` in ``tasks``, by task and metric. Collective.

    ``folder`` holds further task files (YAML); ``limit``: how many questions of each task.

    Raises:
        UserError: the harness knows no such task, cannot load it or lacks a package for it; or it cannot be done here.
    """
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    loaded = _load(_manager(tasks, folder), tasks)
    try:
        results = evaluate(model, loaded, limit=limit, log_samples=False, bootstrap_iters=1000)
    except ImportError as error:  # Some metrics import what they need when they are first used.
        raise UserError(f"--tasks {' '.join(tasks)}: {_line(error)}; install what is missing") from error
    return {
        name: {key.removesuffix(",none"): value for key, value in marks.items() if key != "alias"}
        for name, marks in results["results"].items()
    }


def _load(manager: TaskManager, tasks: Sequence[str]) -> dict[str, Any]:
    """The tasks and groups of tasks, seeded as ``lm_eval.simple_evaluate`` does it."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    try:
        loaded = manager.load(list(tasks))
    except Exception as error:  # A task is code as well as data, and may fail in any way.
        hint = "install what is missing" if isinstance(error, ImportError) else "put that right, or leave the task out"
        raise UserError(f"cannot load --tasks {' '.join(tasks)}: {_line(error)}; {hint}") from error
    for name, task in loaded["tasks"].items():
        for flag, what in CANNOT.items():
            if getattr(task, flag, False):
                raise UserError(f"--tasks: {name} {what}, which depth eval does not; leave it out")
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    return loaded


def _manager(tasks: Sequence[str], folder: str | None) -> TaskManager:
    """One that knows all of ``tasks``. To know the harness's own takes seconds, so those in ``folder`` come first."""
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=folder)
    check_names(tasks, manager.all_tasks)
    return manager


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
