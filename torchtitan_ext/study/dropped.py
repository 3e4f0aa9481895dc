"""Runs of a study that were given up by hand. ``dropped.json`` in the study's folder says which, and why:
``{"format": 1, "runs": {run name: {"reason", "time"}}}``, the time in seconds since the epoch.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file

FORMAT = 1
FILE = "dropped.json"


def dropped_runs(folder: Path) -> dict[str, str]:
    """Why each run of the study in ``folder`` that was dropped was. Raises ``UserError`` where the file is damaged."""
    return {name: entry["reason"] for name, entry in _read(folder / FILE).items()}


def drop_run(folder: Path, name: str, reason: str) -> None:
    """Record that ``name`` is given up."""
    entry = {"reason": reason, "time": time.time()}
    _write(folder / FILE, {**_read(folder / FILE), name: entry})


def take_back(folder: Path, name: str) -> None:
    """Forget that ``name`` was given up. Raises ``UserError`` where it was not."""
    runs = _read(folder / FILE)
    if name not in runs:
        raise UserError(f"{name} was not dropped; there is nothing to take back")
    del runs[name]
    _write(folder / FILE, runs)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}")
        return {str(name): {**entry, "reason": str(entry["reason"])} for name, entry in content["runs"].items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and drop the runs that were given up again") from None


def _write(path: Path, runs: Mapping[str, Mapping[str, Any]]) -> None:
    write_file(path, (json.dumps({"format": FORMAT, "runs": runs}, indent=1) + "\n").encode())
