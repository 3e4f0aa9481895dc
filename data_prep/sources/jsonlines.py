"""Documents from a JSON-lines file: one object on each line, the text under one key."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data_prep.sources.base import PIECE_BYTES
from torchtitan_ext.errors import UserError, nearest


@dataclass(frozen=True)
class JsonLines:
    """A piece held as whole lines; a null counts as an empty document."""

    path: Path
    key: str
    first_line: int
    data: bytes

    @property
    def where(self) -> str:
        return f"{self.path}, from line {self.first_line}"

    @property
    def size(self) -> int:
        return len(self.data)

    def texts(self) -> list[str]:
        numbered = enumerate(self.data.split(b"\n"), self.first_line)
        return [self._text(line, number) for number, line in numbered if line.strip()]

    def _text(self, line: bytes, number: int) -> str:
        try:
            record = json.loads(line)
        except ValueError as error:
            message = f"{self.path}, line {number}: not JSON ({error}); the file needs one object on each line"
            raise UserError(message) from error
        if not isinstance(record, dict):
            raise UserError(
                f"{self.path}, line {number}: not an object; each line needs the form {{{self.key!r}: ...}}"
            )
        if self.key not in record:
            hint = nearest(self.key, record)
            raise UserError(f"{self.path}, line {number}: no key {self.key!r}; {hint} Give it with --text-column")
        text = record[self.key]
        if not isinstance(text, str | None):
            kind = type(text).__name__
            raise UserError(f"{self.path}, line {number}: key {self.key!r} holds {kind}, not text")
        return text or ""


def check(path: Path, key: str) -> None:
    """Raise ``UserError`` unless the file's first line is an object with a text under ``key``."""
    with open(path, "rb") as file:
        for number, line in enumerate(islice(file, 1), 1):
            JsonLines(path, key, number, line).texts()


def pieces(path: Path, key: str) -> Iterator[tuple[JsonLines, float]]:
    """Read the file in runs of whole lines. Work is counted in bytes."""
    line = 1
    with open(path, "rb") as file:
        # readline ends the chunk at a line's end, however long that line is.
        while data := file.read(PIECE_BYTES) + file.readline():
            yield JsonLines(path, key, line, data), len(data)
            line += data.count(b"\n")
