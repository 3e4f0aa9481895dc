"""The tables of a page as CSV, for a program, and as LaTeX, for a paper."""

import csv
import io
import re

from eval.compare.page import MARKUP, Table

FOLDER = "tables"
_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "×": r"$\times$",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "“": "``",
    "”": "''",
    "…": r"\ldots{}",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
}
_SIGNED = re.compile(r"(?<![\w.])-(?=\d)")


def to_csv(table: Table) -> str:
    """With the cells as they are in the report, without its markup."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([[_plain(cell) for cell in row] for row in _lines(table)])
    return file.getvalue()


def to_latex(table: Table) -> str:
    """A ``tabular`` in the style of the package booktabs."""
    head, *rows = [" & ".join(_latex(_plain(cell)) for cell in row) + r" \\" for row in _lines(table)]
    columns = "l" + "".join("l" if number in table.words else "r" for number in range(1, len(table.columns)))
    lines = [
        rf"\begin{{tabular}}{{{columns}}}",
        r"\toprule",
        head,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _lines(table: Table) -> list[list[str]]:
    return [list(table.columns), *map(list, table.rows)]


def _plain(cell: str) -> str:
    return MARKUP.sub(lambda found: found[1] if found[1] is not None else found[2], cell)


def _latex(text: str) -> str:
    """Numbers below zero get a minus sign; other hyphens stay."""
    return "".join(_LATEX.get(character, character) for character in _SIGNED.sub("−", text))
