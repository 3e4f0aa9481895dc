"""How the runs of a plan are trained: a row per run with what differs most often, and the other keys in words."""

from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan_ext.run_file.schema import BUDGETS, UNSUPPORTED
from torchtitan_ext.study.differences import NAMES
from torchtitan_ext.study.layout import folded, row, shown
from torchtitan_ext.study.planned import RunsByLabel, solved
from torchtitan_ext.units import count

COLUMNS = {
    "micro": "training.micro_batch",
    "lr": "optimizer.lr",
    "batch": "training.batch_tokens",
    "warm-up": "optimizer.warmup_steps",
    "sched.": "optimizer.schedule",
    "prec.": "training.precision",
    "compile": "training.compile",
}
"""Heads of the table, with the run key below each. The micro-batch is in sequences, the batch in tokens."""
WIDTHS = (5, 7, 7, 7, 7, 7, 7)
ELSEWHERE = {*COLUMNS.values(), *NAMES, *BUDGETS, *(f"parallelism.{kind}" for kind in UNSUPPORTED), "data.seed"}
"""Run keys that are shown otherwise, or that a study cannot set."""
SECTIONS = ("model.tied", "data.", "training.", "optimizer.", "parallelism.")
"""Beginnings of the run keys that say how a run is trained."""


def recipe_lines(groups: RunsByLabel) -> Iterator[str]:
    """The table of the solved runs, and the keys that all of them share or that change with the size."""
    yield from row("recipe", list(COLUMNS), WIDTHS)
    baselines: dict[str, dict[str, Any]] = {}
    for run, resolved in solved(groups):
        keys = resolved.run.flat()
        yield from row(run.label, [_cell(keys[key]) for key in COLUMNS.values()], WIDTHS)
        if run.baseline is None:
            baselines[run.label] = _further_keys(keys)
    first = next(iter(baselines.values()))
    varying = [key for key in first if len({repr(keys.get(key)) for keys in baselines.values()}) > 1]
    common = {key: value for key, value in first.items() if key not in varying and key.startswith(SECTIONS)}
    yield from folded(f"all runs, but for differences listed below: {_listed(common)}")
    if varying:
        for label, keys in baselines.items():
            yield from folded(f"{label}: {_listed({key: keys.get(key) for key in varying})}")


def _further_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The run keys that have no column and are no matter of the model."""
    return {
        key: value
        for key, value in keys.items()
        if key not in ELSEWHERE and key.startswith((*SECTIONS, "checkpoint.", "heldout.", "logging."))
    }


def _listed(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in keys.items() if value is not None)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        text = f"{value:.3g}"
        return text if len(text) <= max(WIDTHS) else f"{value:.2e}".replace("e-0", "e-")
    if isinstance(value, int) and len(str(value)) > max(WIDTHS):
        return count(value)
    return str(value)
