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
    # The rename itself lives in the folder, which has to reach the disk as well.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
