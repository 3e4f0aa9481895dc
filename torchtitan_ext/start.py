"""Begin or continue a run in its folder: check that it is the same run, check the data, write down what is being
run."""

import importlib.metadata
import logging
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from data_prep import verification
from data_prep.dataset import TokenDataset
from torchtitan_ext.agreement import Gather, alone, by_first, together
from torchtitan_ext.errors import UserError
from torchtitan_ext.machines import processor
from torchtitan_ext.pruned import check_not_pruned
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.resumption import changes
from torchtitan_ext.run_file import dump_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.run_lock import RunLock

PACKAGES = ("torch", "torchtitan", "tokenizers", "safetensors", "numpy")


def check_folder(resolved: ResolvedRun) -> None:
    """Raise ``UserError`` when something else than this run is in the place of its folder. Only reads."""
    folder = RunFolder(resolved.run.folder)
    folder.check_place()
    if folder.exists:
        check_same_run(resolved, folder)
        folder.check_trained_right()


def start_run(resolved: ResolvedRun, rank: int, gather: Gather = alone) -> RunLock | None:
    """Called by every rank before anything is allocated. Returns the lock that the first rank holds from then on.

    ``gather`` gives every rank what each of them passes to it. The first rank alone looks at the folder, so that all
    of them do the same.

    Raises:
        UserError: on every rank, when the folder holds another run or is being trained by another process, or the data
            are not what was prepared. The folder is then as it was, but for its lock.
    """
    folder = RunFolder(resolved.run.folder)
    lock: RunLock | None = None

    def enter() -> dict[str, Any]:
        nonlocal lock
        check_folder(resolved)  # before the lock, so that a refusal touches nothing
        check_not_pruned(folder)
        folder.create()
        lock = RunLock(folder.path)
        return folder.compared_data()

    def begin(compared: dict[str, Any]) -> None:
        revision = _revision()
        changed = list(changes(resolved, folder, revision))
        for change in changed:
            logging.getLogger(__name__).warning(f"Changed since the last start: {change}")
        folder.write_run(dump_run(resolved.run))
        folder.append_code(_code(revision, changed))
        folder.write_compared_data(compared)
        folder.write_facts(resolved.facts())

    try:
        together(gather, lambda: resolved.architecture.variant.check_machine(resolved.run.training.precision))
        before = by_first(gather, rank, enter)
        compared = _compare_data(resolved.dataset, before, rank, gather)
        by_first(gather, rank, lambda: begin(compared))
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def _compare_data(dataset: TokenDataset, before: dict[str, Any], rank: int, gather: Gather) -> dict[str, Any]:
    """Compare the shards that are due with their checksums, shared out among the ranks that see the same files.

    ``before`` and what is returned: for each copy of the data set that a host may have, by its name, what
    ``verification.compare`` says.
    """
    mine = verification.copy_name(dataset)
    copies = together(gather, lambda: mine)
    partners = [other for other, copy in enumerate(copies) if copy == mine]
    known = before.get(mine, {})
    # One rank of each copy says what is due: times that are seen differently from two hosts would leave gaps.
    plans = together(gather, lambda: verification.due(dataset, known) if rank == partners[0] else [])
    share = plans[partners[0]][partners.index(rank) :: len(partners)]
    results = together(gather, lambda: verification.compare(dataset, share))
    # Copies that no host uses any more, such as those on a job's own disk, are forgotten.
    compared = {copy: dict(before.get(copy, {})) for copy in copies}
    for copy, result in zip(copies, results, strict=True):
        compared[copy] |= result
    return compared


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


def _revision() -> str:
    """The revision of the code, and whether the files are what was committed."""

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
    return revision


def _hardware() -> str:
    """``8 processes, NVIDIA B200``; without a GPU the processor and how many cores this machine has."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    device = (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else f"no GPU, {os.cpu_count()} cores of {processor()}"
    )
    return f"{processes} {'process' if processes == 1 else 'processes'}, {device}"


def _code(revision: str, changed: list[str]) -> str:
    """What ``code.txt`` gets about a start."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return (
        f"started   {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC on {platform.node()}\n"
        f"hardware  {_hardware()}\n"
        f"command   {shlex.join(sys.argv)}\n"
        f"revision  {revision}\n"
        f"versions  python {platform.python_version()}, {versions}\n"
        + "".join(f"changed   {change}\n" for change in changed)
        + "\n"
    )
