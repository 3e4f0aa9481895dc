"""What a source of documents is, and how its documents are grouped into blocks of work.

A source has *parts* (files), a part has *rows* (documents), read in *pieces* (about ``PIECE_BYTES`` of text, whole
rows). Parts and rows are numbered the same way every time. A *block* is a run of consecutive pieces, of at least
``BLOCK_BYTES``. Where blocks begin and end depends on the source alone, never on how many processes work on them or on
where an earlier run stopped.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from torchtitan_ext.errors import UserError

PIECE_BYTES = 1 << 20
BLOCK_BYTES = PIECE_BYTES // 2


@dataclass(frozen=True)
class BadRow:
    """Stands for a document that cannot be used, and says why."""

    reason: str


class Piece(ABC):
    """Some whole rows of one part, in a form that is cheap to hand to another process."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Roughly how many bytes of text the piece holds."""

    @property
    @abstractmethod
    def end(self) -> int:
        """The place in the part right behind the piece."""

    @abstractmethod
    def rows(self) -> Sequence[str | BadRow]:
        """Read and decode the rows. Raises ``UserError`` when the file cannot be read."""

    @abstractmethod
    def where(self, index: int) -> str:
        """The place of row ``index`` of this piece, for people."""

    @abstractmethod
    def ends(self) -> Sequence[int]:
        """The places in the part right behind each row."""

    def texts(self) -> list[str]:
        """The documents. Raises ``UserError`` naming the first that cannot be used."""
        return [bad_row(self.where(n), row) if isinstance(row, BadRow) else row for n, row in enumerate(self.rows())]


def bad_row(where: str, row: BadRow) -> str:
    """Raise the ``UserError`` for a document that cannot be used."""
    raise UserError(f"{where}: {row.reason}; repair or remove it, or leave such rows out with --skip-bad-rows")


@dataclass(frozen=True)
class PartFile:
    """What tells the file of a part from others: its name, its size in bytes, and a stamp that changes with it."""

    name: str
    size: int
    stamp: str

    @staticmethod
    def of(path: Path, name: str) -> "PartFile":
        """Look at a local file."""
        stat = path.stat()
        # Nobody can set the change time: it tells of files put in place with their old modification time, too.
        return PartFile(name, stat.st_size, f"{stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}")


class Source(Protocol):
    """A numbered sequence of documents."""

    notes: list[str]
    """What the user must know about the choice of documents; a line each."""

    @property
    def parts(self) -> int:
        """How many parts there are."""

    @property
    def work(self) -> float:
        """The whole amount of work, in the unit that ``pieces`` counts in."""

    @property
    def most_workers(self) -> int:
        """More worker processes than this would find nothing to do."""

    def describe(self) -> dict[str, str | int | None]:
        """What identifies the documents and their order; goes into the manifest and is compared on a later run."""

    def files(self) -> list[PartFile]:
        """The files as they are now, one for each part."""

    def pieces(self, part: int, place: int = 0) -> Iterator[tuple[Piece, float]]:
        """Read one part from ``place``, the end of a row: pieces, each with the work it stands for."""

    def release(self, part: int) -> None:
        """Say that no part before ``part`` is needed any more."""

    def close(self) -> None:
        """Let go of connections and temporary files."""


class Cursor(NamedTuple):
    """A place between two pieces: everything in parts before ``part``, and before ``place`` in it, lies before."""

    part: int
    place: int


@dataclass(frozen=True)
class Block:
    """Consecutive pieces, the part of each, the work they stand for, and the place right behind them."""

    pieces: tuple[Piece, ...]
    parts: tuple[int, ...]
    work: float
    end: Cursor


START = Cursor(0, 0)


def blocks(source: Source, start: Cursor = START) -> Iterator[Block]:
    """Read ``source`` from ``start``, the end of an earlier block or the beginning, block by block."""
    group: list[Piece] = []
    parts: list[int] = []
    size, work = 0, 0.0
    for part in range(start.part, source.parts):
        for piece, piece_work in source.pieces(part, start.place if part == start.part else 0):
            group.append(piece)
            parts.append(part)
            size += piece.size
            work += piece_work
            if size >= BLOCK_BYTES:
                yield Block(tuple(group), tuple(parts), work, Cursor(part, piece.end))
                group, parts, size, work = [], [], 0, 0.0
    if group:
        yield Block(tuple(group), tuple(parts), work, Cursor(source.parts, 0))


@dataclass(frozen=True)
class Texts(Piece):
    """A piece whose documents are already decoded; places are counted in documents."""

    name: str
    first: int
    documents: list[str]

    @property
    def size(self) -> int:
        return sum(map(len, self.documents))

    @property
    def end(self) -> int:
        return self.first + len(self.documents)

    def rows(self) -> Sequence[str | BadRow]:
        return self.documents

    def where(self, index: int) -> str:
        return f"{self.name}, document {self.first + index}"

    def ends(self) -> Sequence[int]:
        return range(self.first + 1, self.end + 1)
