"""Files that are either whole or not there."""

import hashlib
import os
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Write under a temporary name, flush to the disk, then rename to ``path``."""
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


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
