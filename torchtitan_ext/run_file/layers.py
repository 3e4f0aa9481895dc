"""Keys with the place they were given: each run file, and the command line, is one layer."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.parameter_groups import SETTINGS
from torchtitan_ext.run_file.schema import BUDGETS, OPEN_SECTIONS, SECTIONS, fields
from torchtitan_ext.run_file.words import show
from torchtitan_ext.run_file.yaml_text import Pair, Table


@dataclass(frozen=True)
class Place:
    """A line of a run file, a run file as a whole (no ``line``), or the command line.

    ``rank`` puts places in reading order: 0 for the run file, 1, 2 ... for those it extends, then the command line.
    """

    source: str
    rank: int
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def at(self, line: int) -> "Place":
        """Return the place of a line in this file."""
        return replace(self, line=line)

    @property
    def order(self) -> tuple[int, int]:
        return self.rank, sys.maxsize if self.line is None else self.line


COMMAND_LINE = Place("command line", sys.maxsize)


class Given(NamedTuple):
    """A value as it was parsed, and where."""

    value: Any
    place: Place


Layer = dict[str, Given]
"""From ``section.key`` to what was given for it."""


@dataclass
class Problems:
    """Collects what is wrong, to report the first in reading order and count the others."""

    found: list[tuple[Place, str]] = field(default_factory=list)

    def add(self, place: Place, text: str) -> None:
        """Note one problem; the option's dashes are put before a key of the command line."""
        self.found.append((place, f"--{text}" if place is COMMAND_LINE else text))

    def raise_first(self) -> None:
        """Raise the first problem, if there is any.

        Raises:
            UserError: ``place: problem (and N more)``.
        """
        if not self.found:
            return
        place, text = min(self.found, key=lambda problem: problem[0].order)
        more = f" (and {len(self.found) - 1} more)" if len(self.found) > 1 else ""
        raise UserError(f"{place}: {text}{more}")


def printed(text: str) -> str:
    """Return a key or a path for use in an error message, quoted where it would not print as it is."""
    return text if text and text.isprintable() else repr(text)


def is_key(key: str) -> bool:
    """Say whether ``section.key`` is a key of a run file; in an open section the form of the key decides."""
    section, _, option = key.partition(".")
    return OPEN_SECTIONS[section](option) if section in OPEN_SECTIONS else key in fields()


def unknown_key(key: str, dashes: str = "") -> str:
    """Return the sentence about a key that is none, with the nearest one that is.

    ``dashes`` stand before a key on the command line, where the hint names the whole key.
    """
    section, _, last = key.rpartition(".")
    names = [name for name in fields() if name not in OPEN_SECTIONS]
    elsewhere = [name for name in names if name.rpartition(".")[2] == last]
    top = key.partition(".")[0]
    if top in ("depth", "attention"):
        hint = "an option holds only letters, digits and '_'"
    elif top == "groups":
        hint = f"write the name of a parameter group and one of {', '.join(SETTINGS)}, such as groups.gates.lr_factor"
    elif elsewhere:
        hint = f"did you mean {' or '.join(repr(dashes + name) for name in elsewhere)}?"
    elif dashes:
        siblings = [name for name in names if name.startswith(f"{section}.")] if section else []
        hint = nearest(dashes + key, [dashes + name for name in siblings or names])
    elif section:
        hint = nearest(last, [name.removeprefix(f"{section}.") for name in names if name.startswith(f"{section}.")])
    else:
        hint = nearest(last, ["extends", *(name for name in names if "." not in name), *SECTIONS])
    return f"{printed(key)} is not a key; {hint}"


def from_table(table: Table, file: Place, problems: Problems, retired: Mapping[str, Any]) -> Layer:
    """Return the keys of one parsed run file, and note those that are repeated or none.

    ``retired`` are keys that are passed over where they have the value given there."""
    layer: Layer = {}
    for pair in _without_repeats(table.pairs, "", file, problems):
        place = file.at(pair.line)
        section, dot, below = pair.key.partition(".")
        if pair.key in SECTIONS:
            if isinstance(pair.value, Table):
                layer |= _section(pair.key, pair.value, file, problems, retired)
            elif pair.value is not None:
                text = f"{pair.key} is {show(pair.value)}; must be a section, with its keys on indented lines below it"
                problems.add(place, text)
        elif pair.key == "extends" or (pair.key in fields() and not dot):
            layer[pair.key] = Given(pair.value, place)
        elif is_key(pair.key):
            problems.add(place, f"{pair.key} cannot stand on one line; write '{below}:' indented below '{section}:'")
        else:
            problems.add(place, unknown_key(pair.key))
    return layer


def merge(base: Layer, over: Layer) -> Layer:
    """Return ``base`` with the keys of ``over`` put over it; a length of the run replaces any other kind of length."""
    if any(key in over and over[key].value is not None for key in BUDGETS):
        base = {key: given for key, given in base.items() if key not in BUDGETS}
    return base | over


def _section(name: str, table: Table, file: Place, problems: Problems, retired: Mapping[str, Any]) -> Layer:
    layer: Layer = {}
    for pair in _without_repeats(table.pairs, f"{name}.", file, problems):
        key = f"{name}.{pair.key}"
        place = file.at(pair.line)
        if is_key(key):
            layer[key] = Given(pair.value, place)
        elif key not in retired or pair.value != retired[key]:
            problems.add(place, unknown_key(key))
    return layer


def _without_repeats(pairs: Sequence[Pair], prefix: str, file: Place, problems: Problems) -> Iterable[Pair]:
    first: dict[str, int] = {}
    for pair in pairs:
        if pair.key in first:
            text = f"{printed(prefix + pair.key)} is given twice, first in line {first[pair.key]}; keep one"
            problems.add(file.at(pair.line), text)
        else:
            first[pair.key] = pair.line
            yield pair
