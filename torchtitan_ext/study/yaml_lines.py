"""A parsed file as plain dicts and lists, with the place of every key beside them."""

from collections.abc import Callable
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_file.layers import printed
from torchtitan_ext.run_file.yaml_text import Table

Location = tuple[str | int, ...]
Places = dict[Location, str]
"""From keys and list indices to ``file:line`` or an option of the command, in reading order."""


def plain(value: Any, place_at: Callable[[int], str], places: Places, location: Location = ()) -> Any:
    """Return ``value`` without its `Table`s, and note in ``places`` where each key stands.

    ``place_at`` names the place of a line.

    Raises:
        UserError: a mapping has a key twice.
    """
    if isinstance(value, list):
        return [plain(item, place_at, places, (*location, number)) for number, item in enumerate(value)]
    if not isinstance(value, Table):
        return value
    found: dict[str, Any] = {}
    for pair in value.pairs:
        place = place_at(pair.line)
        if pair.key in found:
            raise UserError(f"{place}: {printed(pair.key)} is given twice; keep one")
        if location and isinstance(location[-1], int):
            places.setdefault(location, place)
        places[*location, pair.key] = place
        found[pair.key] = plain(pair.value, place_at, places, (*location, pair.key))
    return found


def place_of(places: Places, location: Location, otherwise: str) -> str:
    """Return the place of ``location`` or of the nearest key around it."""
    for length in range(len(location), 0, -1):
        if location[:length] in places:
            return places[location[:length]]
    return otherwise
