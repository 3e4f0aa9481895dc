"""Begin or continue a run in its folder: check that it is the same run, check the data, write down what is being
run."""

import importlib.metadata
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.pruned import check_not_pruned
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.run_file import dump_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock

PACKAGES = ("torch", "torchtitan", "tokenizers", "safetensors", "numpy")


def start_run(resolved: ResolvedRun, rank: int) -> RunLock | None:
    """Called by every rank before anything is allocated. Returns the lock that the first rank holds from then on.

    Raises ``UserError`` when the folder holds another run or is being trained by another process, or the data are
    damaged.
    """
    lock = None
    resolved.variant.check_machine(resolved.run.training.precision)
    folder = RunFolder(resolved.run.folder)
    fresh = not folder.exists
    if rank == 0:
        folder.create()
        if not fresh:
            check_same_run(resolved, folder)  # before the lock, so that a refusal touches nothing
            check_not_pruned(folder)
        lock = RunLock(folder.path)
        folder.write_run(dump_run(resolved.run))
        folder.append_code(_code())
    if fresh:
        # Once per run: later starts check sizes alone. Each rank reads its share of the shards.
        resolved.dataset.verify_checksums(rank, resolved.ranks)
    if rank == 0:
        folder.write_facts(resolved.facts())
    return lock


def check_same_run(resolved: ResolvedRun, folder: RunFolder) -> None:
    """Raise ``UserError`` saying what differs when ``folder`` belongs to another run."""
    before, now = _flat(folder.facts()["identity"]), _flat(resolved.identity())
    different = [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    ]
    if different:
        raise UserError(
            f"{folder.path} holds another run: {'; '.join(different)}. "
            "Choose another name or folder, or undo the change"
        )


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _code() -> str:
    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        try:
            done = subprocess.run(["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        return done.stdout.strip()

    revision = git("rev-parse", "HEAD") or "not a git checkout"
    if git("status", "--porcelain", "--untracked-files=no"):
        revision += " with uncommitted changes"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"started   {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC on {platform.node()}\n"
        f"command   {shlex.join(sys.argv)}\n"
        f"revision  {revision}\n"
        f"versions  python {platform.python_version()}, {versions}\n\n"
    )
