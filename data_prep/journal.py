"""How far the preparation of a folder has come, so that the same command continues an interrupted one."""

import errno
import fcntl
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from data_prep.manifest import (
    MANIFEST,
    SPLITS,
    TOKEN_BYTES,
    TOKENIZER,
    Count,
    Part,
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

DOWNLOADS = ".downloads"

OPTIONS = {
    "source.config": "--config",
    "source.revision": "--revision",
    "source.text_column": "--text-column",
    "source.document_separator": "--document-separator",
    "tokenizer": "--tokenizer",
    "eot_token": "--eot-token",
    "heldout_fraction": "--heldout-fraction",
    "heldout_by": "the held-out split chosen by",
    "shard_tokens": "--shard-tokens",
}
"""What the user calls a setting; any other is a property of the source."""


CONTENTS = ("source.files", "source.bytes", "source.listing_sha256")
"""What changes when local files are repaired: whether what has been read of them still holds is looked at instead."""


class Journal(Record):
    """Everything before place ``place`` of part ``part`` is in finished shards, and nothing behind it is.

    ``parts`` is what was read of the files so far, the last of them perhaps not to its end.
    """

    version: Literal[2] = 2
    settings: Settings
    part: int = 0
    place: int = 0
    work: float = 0.0
    splits: dict[SplitName, Split] = Field(default_factory=lambda: {name: Split() for name in SPLITS})
    parts: tuple[Part, ...] = Field(default=(), strict=False)
    empty_rows: Count = 0
    skipped_rows: Count = 0

    @property
    def cursor(self) -> Cursor:
        return Cursor(self.part, self.place)

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
        manifest = read_manifest(folder / MANIFEST)
        compared = CONTENTS[1:] if manifest.parts else ()
        _same_settings(folder, "is a finished data set made", manifest.settings, settings, compared)
        return True
    if (folder / JOURNAL).exists():
        journal = read_journal(folder)
        _same_settings(folder, "was begun", journal.settings, settings, CONTENTS if journal.parts else CONTENTS[1:])
    elif folder.exists() and not (folder / LOCK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not a data set folder and not empty; give another --out")
    return False


def _same_settings(folder: Path, state: str, before: Settings, now: Settings, compared: Sequence[str]) -> None:
    """Raise ``UserError`` naming a setting that differs, but for those of files that are ``compared`` otherwise."""
    compared = compared if now.source.get("kind") == "files" else ()
    old, new = _flat(before), _flat(now)
    for key in [*OPTIONS, *old, *new]:
        if old.get(key) != new.get(key) and key not in compared:
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
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
                raise
            # Some shared file systems are mounted without locks, Lustre for example.
            print(
                f"note: the file system of {folder} has no locks ({error.strerror}), so nothing keeps a second "
                "`depth prep` out of this folder; see to it that only one runs",
                file=sys.stderr,
                flush=True,
            )
        yield


def clear_working_files(folder: Path) -> None:
    """Remove what only an unfinished folder needs."""
    shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)
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
