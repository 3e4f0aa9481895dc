"""How far the preparation of a folder has come, so that the same command continues an interrupted one."""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, ValidationError

from data_prep.manifest import (
    MANIFEST,
    SPLITS,
    TOKEN_BYTES,
    TOKENIZER,
    Record,
    Settings,
    Split,
    SplitName,
    read_manifest,
)
from data_prep.sources import Cursor
from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file

JOURNAL = "progress.json"
LOCK = ".depth-prep.lock"
"""There while a preparation works on the folder, or after it was killed: what else is there is its own."""

OPTIONS = {
    "source.config": "--config",
    "source.revision": "--revision",
    "source.text_column": "--text-column",
    "source.document_separator": "--document-separator",
    "tokenizer": "--tokenizer",
    "eot_token": "--eot-token",
    "heldout_fraction": "--heldout-fraction",
    "shard_tokens": "--shard-tokens",
}
"""What the user calls a setting; any other is a property of the source."""


class Journal(Record):
    """Everything before piece ``piece`` of part ``part`` is in finished shards, and nothing behind it is."""

    settings: Settings
    part: int = 0
    piece: int = 0
    work: float = 0.0
    splits: dict[SplitName, Split] = Field(default_factory=lambda: {name: Split() for name in SPLITS})

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.part, self.piece)

    def write(self, folder: Path) -> None:
        write_file(folder / JOURNAL, self.model_dump_json().encode() + b"\n")


def read_journal(folder: Path) -> Journal:
    path = folder / JOURNAL
    try:
        return Journal.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UserError(f"{path} is from another version or damaged; delete {folder} and prepare it again") from error


def is_finished(folder: Path, settings: Settings) -> bool:
    """Look at a folder before anything is written to it.

    Returns:
        True when it holds the finished data set that ``settings`` describe, False when there is work left to do.

    Raises:
        UserError: it holds something else.
    """
    if (folder / MANIFEST).exists():
        _same_settings(folder, "is a finished data set made", read_manifest(folder / MANIFEST).settings, settings)
        return True
    if (folder / JOURNAL).exists():
        _same_settings(folder, "was begun", read_journal(folder).settings, settings)
    elif folder.exists() and not (folder / LOCK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not a data set folder and not empty; give another --out")
    return False


def _same_settings(folder: Path, state: str, before: Settings, now: Settings) -> None:
    old, new = _flat(before), _flat(now)
    for key in [*OPTIONS, *old, *new]:
        if old.get(key) != new.get(key):
            name = OPTIONS.get(key, key.replace(".", " "))
            raise UserError(
                f"{folder} {state} with {name} {old.get(key)!r}, not {new.get(key)!r}; "
                "give the same settings, or another --out"
            )


def _flat(settings: Settings) -> dict[str, object]:
    values = settings.model_dump()
    source = values.pop("source")
    return {f"source.{key}": value for key, value in source.items()} | values


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep every other preparation out of ``folder``; the lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another `depth prep` is writing to {folder}; wait for it, or give another --out"
            raise UserError(message) from error
        yield


def clear_working_files(folder: Path) -> None:
    """Remove what only an unfinished folder needs."""
    for path in [folder / JOURNAL, folder / LOCK, *folder.rglob(".*.tmp")]:
        path.unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove everything that a preparation wrote, so that the next one may use other settings."""
    clear_working_files(folder)
    for name in (TOKENIZER, TOKEN_BYTES):
        (folder / name).unlink(missing_ok=True)
    for split in SPLITS:
        shutil.rmtree(folder / split, ignore_errors=True)
    folder.rmdir()
