"""A page as a list of blocks, which ``page_html`` and ``page_markdown`` write down.

Text may hold ``**bold**`` and `` `code` ``. Names that come from outside go through ``name``.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

MARKUP = re.compile(r"`([^`]*)`|\*\*([^*]+)\*\*")
"""What is marked in a text: the first group is code, the second is bold."""


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
    """The first column names the row. ``file``: the name under which it is kept as CSV and LaTeX, without an ending;
    of several tables of a page with one name, all but the first get a number. ``words``: numbers of the columns that
    hold words, which may be broken into lines."""

    file: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = ()


@dataclass(frozen=True)
class Picture:
    """``file`` is the name under which ``report.md`` keeps it, without an ending; ``svg``: as ``drawing.as_svg`` gives
    it."""

    file: str
    svg: str
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


def all_blocks(blocks: Sequence[Block]) -> Iterator[Block]:
    """In order, those that are folded away among them."""
    for block in blocks:
        yield block
        if isinstance(block, Folded):
            yield from all_blocks(block.blocks)


def pictures_of(blocks: Sequence[Block]) -> list[Picture]:
    """All pictures in order."""
    return [one for block in all_blocks(blocks) if isinstance(block, Pictures) for one in block.pictures]


def tables_of(blocks: Sequence[Block]) -> dict[str, Table]:
    """All tables in order, by the name of their files."""
    found: dict[str, Table] = {}
    for block in all_blocks(blocks):
        if isinstance(block, Table):
            number = 1
            while (file := block.file if number == 1 else f"{block.file}-{number}") in found:
                number += 1
            found[file] = block
    return found
