"""What is different when a run goes on: its recipe, the code's revision, a schedule that had come to its end.

A run folder refuses another model or other data (``start.py``). Everything else may change between two starts, but
never in silence: what changed is printed at the start and kept in ``code.txt``.
"""

import re
from collections.abc import Iterator
from typing import Any

from torchtitan_ext.older import RETIRED_KEYS
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.run_file import load_run
from torchtitan_ext.run_folder import RunFolder

NAMES = {"name", "folder"}
"""Keys of a run file that do not say how a run is trained."""


def changes(resolved: ResolvedRun, folder: RunFolder, revision: str) -> Iterator[str]:
    """What differs from the last start of the run in ``folder``, a line each; nothing for a run that is new."""
    recorded = folder.path / "run.yaml"
    if not folder.exists or not recorded.exists():
        return
    before, now = load_run(recorded, retired=RETIRED_KEYS).flat(), resolved.run.flat()
    for key in {**before, **now}:
        if key not in NAMES and before.get(key) != now.get(key):
            yield f"{key} was {_shown(before.get(key))}, is {_shown(now.get(key))}"
    status = folder.readable_status()
    if status.get("state") == "finished" and resolved.steps > status["step"]:
        yield (
            f"the learning rate had come to its end at step {status['step']}, and goes on from where the schedule of "
            f"{resolved.steps} steps has it there"
        )
    last = last_revision(folder)
    if last is not None and last != revision:
        yield f"the code's revision was {last}, is {revision}"


def last_revision(folder: RunFolder) -> str | None:
    """The revision of the code at the last start, as ``code.txt`` has it; None where it has none."""
    path = folder.path / "code.txt"
    found = re.findall(r"^revision  (.*)$", path.read_text(encoding="utf-8"), re.M) if path.exists() else []
    return found[-1] if found else None


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
