"""What a source of documents is, and how its documents are grouped into blocks of work.

A source has *parts* (files), a part has *pieces* (about ``PIECE_BYTES`` of text, whole documents), and both are
numbered the same way every time. A *block* is a run of consecutive pieces, of at least ``BLOCK_BYTES``. Where blocks
begin and end depends on the source alone, never on how many processes work on them or on where an earlier run stopped.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

PIECE_BYTES = 1 << 20
BLOCK_BYTES = PIECE_BYTES // 2


class Piece(Protocol):
    """Some whole documents, in a form that is cheap to hand to another process."""

    @property
    def where(self) -> str:
        """The place in the source, for error messages."""

    @property
    def size(self) -> int:
        """Roughly how many bytes of text the piece holds."""

    def texts(self) -> list[str]:
        """Decode the documents. Raises ``UserError`` when they are malformed."""


class Source(Protocol):
    """A numbered sequence of documents."""

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

    def pieces(self, part: int) -> Iterator[tuple[Piece, float]]:
        """Read one part: pieces, each with the work it stands for."""


class Cursor(NamedTuple):
    """A place between two pieces: ``piece`` pieces of part ``part`` lie before it."""

    part: int
    piece: int


@dataclass(frozen=True)
class Block:
    """Consecutive pieces, the work they stand for, and the place right behind them."""

    pieces: tuple[Piece, ...]
    work: float
    end: Cursor


START = Cursor(0, 0)


def blocks(source: Source, start: Cursor = START) -> Iterator[Block]:
    """Read ``source`` from ``start``, the end of an earlier block or the beginning, block by block."""
    group: list[Piece] = []
    size, work = 0, 0.0
    for part in range(start.part, source.parts):
        done = start.piece if part == start.part else 0
        for number, (piece, piece_work) in enumerate(source.pieces(part)):
            if number < done:
                continue
            group.append(piece)
            size += piece.size
            work += piece_work
            if size >= BLOCK_BYTES:
                yield Block(tuple(group), work, Cursor(part, number + 1))
                group, size, work = [], 0, 0.0
    if group:
        yield Block(tuple(group), work, Cursor(source.parts, 0))


@dataclass(frozen=True)
class Texts:
    """A piece whose documents are already decoded."""

    where: str
    documents: list[str]

    @property
    def size(self) -> int:
        return sum(map(len, self.documents))

    def texts(self) -> list[str]:
        return self.documents
