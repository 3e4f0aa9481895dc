"""Folders that are either whole or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_ext.errors import UserError


def check_free(path: Path, size: int, option: str) -> None:
    """Raise ``UserError``, naming the ``option`` that says otherwise, when ``path`` is taken, cannot be made, or has no
    room for ``size`` bytes."""
    if os.path.lexists(path):
        raise UserError(f"{path} is there already; remove it, or choose another one with {option}")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{path} cannot be made, for {parent} cannot be written to; choose another one with {option}")
    free = shutil.disk_usage(parent).free
    if free < size:
        raise UserError(
            f"{path} needs {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there; make room, or choose another "
            f"one with {option}"
        )


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill under a temporary name, which becomes ``path`` at the end of the block, or nothing on an error.

    ``path`` is not there yet.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for entry in [temporary, *temporary.rglob("*")]:
            _flush(entry)
        os.replace(temporary, path)
        _flush(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
