"""Study files into studies: YAML and the command line's keys, with errors that name file, line and key."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.run_file.layers import printed
from torchtitan_ext.run_file.yaml_text import YamlTextError, parse_mapping, parse_value
from torchtitan_ext.study.check import check_names
from torchtitan_ext.study.schema import Study
from torchtitan_ext.study.words import describe, key_location
from torchtitan_ext.study.yaml_lines import Location, Places, place_of, plain

SECTIONS = ("budget", "stop", "set")
"""Keys of a study whose values are mappings: the command line sets them whole, as ``--section "{key: value}"``, or in
part, as ``--section.key value``."""


def load_study(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Study:
    """Read a study file into a checked study.

    Args:
        path: the study file.
        overrides: keys of the study from the command line, ``--seeds "[0]"``, ``--budget "{match: flops}"`` or
            ``--set.training.steps 60``, which win over the file's.

    Raises:
        UserError: the file cannot be read, or something in it is wrong; one line with file, line and key.
    """
    file = Path(path)
    places: Places = {}
    try:
        data = plain(parse_mapping(_read(file)), lambda line: f"{printed(str(file))}:{line}", places)
    except YamlTextError as error:
        raise UserError(f"{printed(str(file))}:{error.line}: {error.problem}") from None
    _override(data, overrides, places)
    data.setdefault("name", file.stem)
    try:
        study = Study.model_validate(data)
    except ValidationError as error:
        raise UserError(_first(error, places, printed(str(file)))) from None
    study._file, study._places = file, places
    check_names(study)
    return study


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{printed(str(file))}: the file is not UTF-8 text; save it as UTF-8") from None
    except FileNotFoundError:
        names = sorted(entry.name for entry in file.parent.glob("*.y*ml"))
        hint = nearest(file.name, names) if names else f"there is no .yaml file in {printed(str(file.parent))} either"
        raise UserError(f"{printed(str(file))} does not exist; {hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{printed(str(file))} cannot be read: {reason}") from None


def _override(data: dict[str, Any], tokens: Sequence[str], places: Places) -> None:
    """Put the command line's keys over the file's."""
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        key, equals, text = token.removeprefix("--").partition("=")
        if not token.startswith("--") or not key:
            raise UserError(f"command line: {printed(token)} is not an option; write --key value")
        if not equals:
            if not rest:
                raise UserError(f"command line: --{key} needs a value; write --{key} value")
            text = rest.pop(0)
        section, dot, below = key.partition(".")
        if section not in Study.model_fields:
            raise UserError(f"command line: --{key} is not a key of a study; {nearest(key, Study.model_fields)}")
        if dot and section not in SECTIONS:
            raise UserError(f"command line: --{key}: give {section} whole, as --{section} value")
        if dot and not isinstance(data.setdefault(section, {}), dict):
            raise UserError(f"command line: --{key}: {section} in the file is not a mapping")
        place = f"command line: --{key}"
        location = (section, below) if dot else (section,)
        for known in [known for known in places if known[: len(location)] == location]:
            del places[known]
        places[location] = place
        try:
            parsed = parse_value(text, mapping=section in SECTIONS and not dot)
        except YamlTextError as error:
            raise UserError(f"{place} {printed(text)}: {error.problem}") from None
        value = plain(parsed, _always(place), places, location)
        (data[section] if dot else data)[location[-1]] = value


def _always(place: str) -> Callable[[int], str]:
    return lambda line: place


def _first(error: ValidationError, places: Places, file: str) -> str:
    """The problem that comes first in the file, and how many more there are."""
    order = {place: number for number, place in enumerate(places.values())}
    found: dict[Location, tuple[int, str]] = {}
    for details in error.errors(include_url=False):
        location = key_location(details["loc"])
        place = place_of(places, location, file)
        found.setdefault(location, (order.get(place, -1), f"{place}: {describe(details)}"))
    _, first = min(found.values(), key=lambda problem: problem[0])
    return first + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
