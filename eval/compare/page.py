"""A page as a list of blocks, which ``page_html`` and ``page_markdown`` write down.

Text may hold ``**bold**`` and `` `code` ``. Names that come from outside go through ``name``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from matplotlib.figure import Figure


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Warning:
    """Something a reader must not miss."""

    text: str


@dataclass(frozen=True)
class Bullets:
    items: Sequence[str]


@dataclass(frozen=True)
class Table:
    """The first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """``file`` is the name under which ``report.md`` keeps it, without an ending."""

    file: str
    figure: Figure
    caption: str


@dataclass(frozen=True)
class Pictures:
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Folded:
    """What only some readers want, closed at first."""

    title: str
    blocks: Sequence["Block"]


Block: TypeAlias = Heading | Text | Warning | Bullets | Table | Pictures | Folded


@dataclass(frozen=True)
class Page:
    title: str
    blocks: Sequence[Block]


def name(text: object) -> str:
    """A name from outside as code, so that nothing in it is taken for markup."""
    return f"`{str(text).replace('`', chr(39)).replace(chr(10), ' ')}`"


def pictures_of(blocks: Sequence[Block]) -> list[Picture]:
    """All pictures in order."""
    found: list[Picture] = []
    for block in blocks:
        if isinstance(block, Pictures):
            found += block.pictures
        elif isinstance(block, Folded):
            found += pictures_of(block.blocks)
    return found
