"""The files of a checkpoint folder: which there are, whether they are what was written, and which to clear away.

A finished checkpoint ``step-N`` holds ``files.json``: each file's size and CRC-32. Lists of earlier versions have sizes
alone. Damaged checkpoints that a run went on without are called ``damaged-step-N``, unfinished ones ``.step-N.tmp``.
"""

import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_ext.files import write_file

FILE_LIST = "files.json"
METADATA = ".metadata"
"""Distributed checkpoints' table of contents."""
CHUNK = 4 << 20
READERS = 8
"""Files read at a time: checksums are taken at several GB/s each, so that the disk is what takes the time."""


@dataclass(frozen=True)
class Listed:
    """What a file list says of a file: its size in bytes and its CRC-32 in hexadecimal digits, None in lists of earlier
    versions."""

    size: int
    crc32: str | None


class Damage(Exception):
    """What is wrong with a checkpoint, naming the file."""


def checksums(checkpoint: Path, names: Iterable[str]) -> dict[str, Listed]:
    """Read files of ``checkpoint`` and say what they are."""

    def listed(name: str) -> Listed:
        return Listed((checkpoint / name).stat().st_size, _crc32(checkpoint / name))

    names = list(names)
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(listed, names), strict=True))


def write_file_list(checkpoint: Path, files: dict[str, Listed] | None = None) -> None:
    """List a finished checkpoint's files, with ``files`` where their checksums have been taken already: only then does
    ``damage_of`` find it whole."""
    if files is None:
        files = checksums(checkpoint, (file.name for file in checkpoint.iterdir() if file.name != FILE_LIST))
    content = {name: asdict(files[name]) for name in sorted(files)}
    write_file(checkpoint / FILE_LIST, json.dumps(content, indent=1).encode())


def read_file_list(checkpoint: Path) -> dict[str, Listed]:
    """The files that ``checkpoint`` should have. Raises ``Damage``."""
    try:
        content = json.loads((checkpoint / FILE_LIST).read_text(encoding="utf-8"))
        files = {name: _listed(entry) for name, entry in content.items()}
        files[METADATA]  # no checkpoint is without it
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise Damage(f"{checkpoint / FILE_LIST} is missing or damaged") from None
    return files


def check_sizes(checkpoint: Path, files: dict[str, Listed]) -> None:
    """Raises ``Damage`` unless all of ``files`` are there with their sizes."""
    for name, listed in files.items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
        except OSError:
            raise Damage(f"{path} is missing") from None
        if size != listed.size:
            raise Damage(f"{path} has {size} bytes, {listed.size} were written")


def check_contents(checkpoint: Path, files: dict[str, Listed]) -> None:
    """Raises ``Damage`` unless ``files`` have their checksums, where the list has any. Reads them whole."""
    known = {name: listed for name, listed in files.items() if listed.crc32 is not None}
    try:
        found = checksums(checkpoint, known)
    except OSError as error:
        raise Damage(f"{error.filename} cannot be read ({error.strerror})") from error
    for name, listed in known.items():
        if found[name] != listed:
            raise Damage(f"{checkpoint / name} is not what was written (its checksum differs)")


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint as far as its files' sizes tell, naming the file; None when they are right."""
    return listed_files(checkpoint)[1]


def listed_files(checkpoint: Path) -> tuple[dict[str, Listed], str | None]:
    """The files of a checkpoint, none where it is damaged, and what ``damage_of`` says of it."""
    try:
        files = read_file_list(checkpoint)
        check_sizes(checkpoint, files)
    except Damage as damage:
        return {}, str(damage)
    return files, None


def saved_steps(folder: str | Path) -> list[int]:
    """The steps of the finished checkpoints in ``folder``, in order, whether whole or damaged."""
    return _steps(folder, r"step-(\d+)")


def steps_set_aside(folder: str | Path) -> list[int]:
    """The steps of the damaged checkpoints that ``set_aside`` renamed."""
    return _steps(folder, r"damaged-step-(\d+)")


def set_aside(folder: str | Path, step: int) -> Path:
    """Take the checkpoint of ``step`` out of the way, under the name that is returned."""
    aside = Path(folder) / f"damaged-step-{step}"
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(Path(folder) / f"step-{step}", aside)
    return aside


def remove_unfinished(folder: Path, say: Callable[[str], None]) -> None:
    """Remove what a process that was killed while it saved has left in ``folder``. Only for who alone may write there.

    ``say`` is told of each.
    """
    for step in _steps(folder, r"\.step-(\d+)\.tmp"):
        path = folder / f".step-{step}.tmp"
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            say(f"Removed {path}: an earlier start was ended while it saved")


def wait_for_sizes(checkpoint: Path, files: dict[str, Listed], seconds: float) -> None:
    """Wait until all of ``files`` are there with their sizes: a network file system may show them late.

    Raises ``Damage`` when they are not after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return check_sizes(checkpoint, files)
        except Damage:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _listed(entry: object) -> Listed:
    if isinstance(entry, dict):
        listed = Listed(**entry)
        if not (isinstance(listed.crc32, str) and re.fullmatch("[0-9a-f]{8}", listed.crc32)):
            raise ValueError
    else:
        listed = Listed(entry, None)  # type: ignore[arg-type]
    if type(listed.size) is not int:
        raise TypeError
    return listed


def _crc32(path: Path) -> str:
    value, chunk = 0, memoryview(bytearray(CHUNK))
    try:
        with open(path, "rb", buffering=0) as file:
            while read := file.readinto(chunk):
                value = zlib.crc32(chunk[:read], value)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # reading does not say which file it was
    return f"{value:08x}"


def _steps(folder: str | Path, pattern: str) -> list[int]:
    if not Path(folder).is_dir():
        return []
    names = [re.fullmatch(pattern, path.name) for path in Path(folder).iterdir()]
    return sorted(int(name[1]) for name in names if name)
