"""Where the runs of a comparison come from: what ``code.txt`` and the run file say of each → values for the report."""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eval.compare.curves import READ
from eval.compare.grouping import Family
from eval.compare.numbers import plural, seconds
from eval.compare.run import Origin, Run

NOT_RECORDED = "not recorded"
_MANY = 4


def read_origin(folder: Path, settings: Mapping[str, Any]) -> Origin:
    """Of a run folder; what it does not say stays empty. ``settings``: of its run file, flat."""
    try:
        text = (folder / "code.txt").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    starts = re.findall(r"^started   (\S+) .* on (.*)$", text, re.MULTILINE)
    return Origin(
        days=tuple(day for day, _ in starts),
        machines=_distinct(machine for _, machine in starts),
        hardware=_distinct(re.findall(r"^hardware  (.*)$", text, re.MULTILINE)),
        revisions=_distinct(map(_short, re.findall(r"^revision  (.*)$", text, re.MULTILINE))),
        versions=_distinct(re.findall(r"^versions  (.*)$", text, re.MULTILINE)),
        data=None if settings.get("data.path") is None else str(settings["data.path"]),
        precision=None if settings.get("training.precision") is None else str(settings["training.precision"]),
    )


def provenance(family: Family) -> dict[str, list[str]]:
    """Values of all runs of ``family`` by what they say, in the order of the report."""
    runs = [run for group in family.all for run in group.runs]
    origins = [run.origin for run in runs if run.origin is not None]
    days = sorted(day for origin in origins for day in origin.days)
    fingerprint = sorted({str(run.data["training data"]) for run in runs if run.data})
    found: dict[str, Iterable[str]] = {
        "study": [run.study for run in runs if run.study],
        "date": dict.fromkeys([days[0], days[-1]]) if days else [],
        "revision": [one for origin in origins for one in origin.revisions],
        "hardware": [one for origin in origins for one in origin.hardware],
        "machine": [one for origin in origins for one in origin.machines],
        "software": [one for origin in origins for one in origin.versions],
        "data": [*(origin.data for origin in origins if origin.data), *(f"fingerprint {one}" for one in fingerprint)],
        "batch": _numbers((run.settings.get("training.batch_tokens") for run in runs), "{} tokens"),
        "learning rate": _numbers((run.settings.get("optimizer.lr") for run in runs), "{}"),
        "length": _numbers((READ[family.measure](run).steps[-1] for run in runs), "{} steps"),
        "precision": [origin.precision for origin in origins if origin.precision],
        "training time": _training_time(runs, family.measure),
    }
    return {what: list(_distinct(values)) for what, values in found.items()}


def _short(revision: str) -> str:
    """``1a2b3c4d5e6f with uncommitted changes``."""
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", revision)


def _numbers(values: Iterable[Any], form: str) -> list[str]:
    numbers = sorted({value for value in values if isinstance(value, int | float) or hasattr(value, "__index__")})
    return [form.format(f"{int(number):,}" if number == int(number) else f"{number:g}") for number in numbers]


def _training_time(runs: Iterable[Run], measure: str) -> list[str]:
    """Of all runs together, neither evaluation nor checkpoints; empty where one does not say."""
    curves = [READ[measure](run) for run in runs]
    ends = [curve.end("seconds") for curve in curves]
    total = sum(ends)
    if not math.isfinite(total):
        return []
    return [f"{seconds(total)} in {plural(len(ends), 'run')}"]


def _distinct(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def said(values: Iterable[str]) -> str:
    """The values of one row; of many the first few."""
    known = list(values)
    more = f" and {len(known) - _MANY} more" if len(known) > _MANY else ""
    return ", ".join(known[:_MANY]) + more if known else NOT_RECORDED
