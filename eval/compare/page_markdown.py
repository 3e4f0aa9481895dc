"""A page → Markdown, with its pictures as files beside it."""

import re
from collections.abc import Sequence

from eval.compare.page import Block, Bullets, Folded, Heading, Page, Pictures, Table, Text, Warning

FOLDER = "pictures"


def to_markdown(page: Page) -> str:
    return "\n\n".join([f"# {_plain(page.title)}", *(_block(block) for block in page.blocks)]) + "\n"


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_plain(text)}"
        case Text(text):
            return _plain(text)
        case Warning(text):
            return f"> **Note.** {_plain(text)}"
        case Bullets(items):
            return "\n".join(f"- {_plain(item)}" for item in items)
        case Table(_, columns, rows, words):
            lines = [
                _row(columns),
                "|---" + "".join("|---" if number in words else "|---:" for number in range(1, len(columns))) + "|",
                *(_row(row) for row in rows),
            ]
            return "\n".join(lines)
        case Pictures(pictures):
            return "\n\n".join(
                f"![{_alt(picture.caption)}]({FOLDER}/{picture.file}.svg)\n\n{_plain(picture.caption)}"
                for picture in pictures
            )
        case Folded(title, blocks):
            return "\n\n".join([f"**{_plain(title)}**", *(_block(inside) for inside in blocks)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_plain(cell).replace("|", "\\|") for cell in cells) + " |"


def _plain(text: str) -> str:
    """Keep what is not code from being taken for HTML."""
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;") for part in re.split(r"(`[^`]*`)", text))


def _alt(caption: str) -> str:
    return re.sub(r"[`*\[\]<>]", "", caption.split(". ")[0])
