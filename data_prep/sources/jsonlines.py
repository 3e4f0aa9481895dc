"""Documents from a JSON-lines file: one object on each line, the text under one key.

A plain file is read by the process that tokenises: what is handed to it is where the lines are.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from data_prep.sources.base import PIECE_BYTES, BadRow, Piece
from data_prep.sources.compressed import TextFile, codec
from torchtitan_ext.errors import UserError, nearest


@dataclass(frozen=True)
class JsonLines(Piece):
    """``length`` bytes of whole lines from byte ``place``, in ``data`` or in the file.

    Blank lines are no rows; a null counts as an empty document.
    """

    path: Path
    key: str
    place: int
    length: int
    data: bytes | None

    @property
    def size(self) -> int:
        return self.length

    @property
    def end(self) -> int:
        return self.place + self.length

    def rows(self) -> Sequence[str | BadRow]:
        return [self._row(line) for line in self._lines() if line.strip()]

    def where(self, index: int) -> str:
        numbers = [number for number, line in enumerate(self._lines(), 1) if line.strip()]
        return f"{self.path}, line {_lines_before(self.path, self.place) + numbers[index]}"

    def ends(self) -> Sequence[int]:
        lines = self._lines()
        behind = accumulate((len(line) + 1 for line in lines), initial=self.place)
        next(behind)
        return [min(end, self.end) for line, end in zip(lines, behind, strict=True) if line.strip()]

    def _lines(self) -> list[bytes]:
        if self.data is not None:
            return self.data.split(b"\n")
        with TextFile(self.path, self.place) as file:
            data = file.read(self.length)
        if len(data) != self.length:
            raise UserError(f"{self.path} became shorter while it was read; run the same command again to continue")
        return data.split(b"\n")

    def _row(self, line: bytes) -> str | BadRow:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            return BadRow(f"not JSON ({error}); the file needs one object on each line")
        if not isinstance(record, dict):
            return BadRow(f"not an object; each line needs the form {{{self.key!r}: ...}}")
        if self.key not in record:
            return BadRow(f"no key {self.key!r}; {nearest(self.key, record)} Give it with --text-column")
        text = record[self.key]
        if not isinstance(text, str | None):
            return BadRow(f"key {self.key!r} holds {type(text).__name__}, not text")
        return text or ""


def check(path: Path, key: str) -> None:
    """Raise ``UserError`` unless the file's first line is an object with a text under ``key``."""
    with TextFile(path, 0) as file:
        try:
            line = file.readline()
        except OSError as error:
            raise _unreadable(path, error) from error
    JsonLines(path, key, 0, len(line), line).texts()


def pieces(path: Path, key: str, place: int = 0) -> Iterator[tuple[Piece, float]]:
    """Read the file from byte ``place``, the begin of a line, in runs of whole lines. Work is counted in bytes."""
    if codec(path) is None:
        yield from _plain(path, key, place)
        return
    with TextFile(path, place) as file:
        begin, done = file.place, file.work
        try:
            # readline ends the chunk at a line's end, however long that line is.
            while data := file.read(PIECE_BYTES) + file.readline():
                yield JsonLines(path, key, begin, len(data), data), file.work - done
                begin, done = file.place, file.work
        except OSError as error:
            raise _unreadable(path, error) from error


def _plain(path: Path, key: str, place: int) -> Iterator[tuple[Piece, float]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        while place < size:
            file.seek(place + PIECE_BYTES)
            file.readline()
            end = min(file.tell(), size)
            yield JsonLines(path, key, place, end - place, None), end - place
            place = end


def _lines_before(path: Path, place: int) -> int:
    """Count the lines in the first ``place`` bytes: only an error message needs it."""
    lines = 0
    with TextFile(path, 0) as file:
        while place and (data := file.read(min(place, PIECE_BYTES))):
            lines += data.count(b"\n")
            place -= len(data)
    return lines


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({error}); download it again and run the same command again to continue")
