"""Files that are either whole or not there."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to; on a clean exit flush it to disk and rename it to ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    yield temporary
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    # The rename itself lives in the folder, which has to reach the disk as well.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
