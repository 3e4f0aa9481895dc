"""Checksums."""

import hashlib
from pathlib import Path


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
