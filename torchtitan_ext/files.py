"""Files that are either whole or not there."""

import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Replace ``path``: write under a temporary name, flush to the disk, rename. A crash leaves the old or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Let what was renamed in ``folder`` reach the disk: a rename lives in the folder, not in the file."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
