"""Step times of runs that have ended, from their folders."""

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from torchtitan_ext.run_folder import RunFolder

STEP_SECONDS = "time_metrics/end_to_end(s)"


def step_seconds(folder: Path) -> float | None:
    """Return the median step time of a finished or diverged run in seconds; None while there is none."""
    run = RunFolder(folder)
    if not run.exists or (run.status() or {}).get("state") not in ("finished", "diverged"):
        return None
    times = [record[STEP_SECONDS] for record in run.metrics() if STEP_SECONDS in record]
    return median(times) if times else None


def common_step_seconds(folders: Iterable[Path]) -> float | None:
    """Return the median over runs that differ in seed alone; None while one of them has not ended."""
    times = [step_seconds(folder) for folder in folders]
    known = [time for time in times if time is not None]
    return median(known) if known and len(known) == len(times) else None


def begun_steps(folders: Iterable[Path]) -> int | None:
    """Return the length that the first of these runs to have been started was started with."""
    for folder in map(RunFolder, folders):
        if folder.exists:
            return int(folder.facts()["steps"])
    return None
