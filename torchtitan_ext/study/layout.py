"""Text of 80 columns: rows with a label, and lines that are folded."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

WIDTH = 80
LABEL_WIDTH = 26
"""A longer label stands on a line of its own."""


Remark = tuple[str, str]
"""A label, and what is to be said about its runs."""


def row(label: str, cells: Sequence[Any], widths: Sequence[int]) -> Iterator[str]:
    """A label and cells aligned to the right, each with a space before it."""
    if len(label) > LABEL_WIDTH:
        yield label
        label = ""
    yield f"{label:<{LABEL_WIDTH}}" + "".join(f" {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def folded(text: str, indent: str = "") -> list[str]:
    """The lines of ``text``, the second and later ones with two more columns of ``indent``."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def section(title: str, lines: Iterable[Remark]) -> list[str]:
    """An empty line, a title and what there is to say about each label; nothing without lines."""
    below = [line for label, text in lines for line in folded(f"{label}: {text}", "  ")]
    return ["", title, *below] if below else []


def shown(value: Any) -> str:
    """A run key's value as a run file has it, with numbers of six digits."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
