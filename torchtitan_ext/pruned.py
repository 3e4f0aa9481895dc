"""Runs whose checkpoints were reduced to save disk (`depth study prune`), which therefore cannot be trained on.

``checkpoint/pruned.json`` in the run folder says so: ``{"format": 1, "kept": "weights" or "records", "step", "done"}``.
It is written before anything is deleted, and again with ``done`` true behind the last deletion.
"""

import json
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file
from torchtitan_ext.run_folder import RunFolder

FORMAT = 1
MARK = "pruned.json"


def mark_pruned(folder: RunFolder, kept: str, step: int, *, done: bool) -> None:
    """Note what is ``kept`` of the checkpoints of a run that ended at ``step``."""
    mark = {"format": FORMAT, "kept": kept, "step": step, "done": done}
    write_file(folder.checkpoint_path / MARK, (json.dumps(mark) + "\n").encode())


def kept_of(folder: RunFolder) -> str | None:
    """What a pruned run keeps of its checkpoints; None for a run that was not pruned."""
    mark = _read(folder)
    return str(mark["kept"]) if mark else None


def is_pruned_to(folder: RunFolder, kept: str) -> bool:
    """Whether no more than ``kept`` is there: pruning was not interrupted."""
    mark = _read(folder)
    return bool(mark) and mark["done"] and mark["kept"] in (kept, "records")


def check_not_pruned(folder: RunFolder) -> None:
    """Raise ``UserError`` where ``folder`` has nothing left to train on from."""
    kept = kept_of(folder)
    if kept is not None:
        left = "only the weights are left" if kept == "weights" else "its checkpoints were deleted"
        raise UserError(
            f"{folder.path} was pruned, so that it cannot be trained on: {left}; choose another name or folder"
        )


def _read(folder: RunFolder) -> dict[str, Any]:
    path = folder.checkpoint_path / MARK
    try:
        mark = json.loads(path.read_text(encoding="utf-8"))
        return {"kept": str(mark["kept"]), "done": bool(mark["done"])}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); the run was pruned and cannot be trained on") from None
