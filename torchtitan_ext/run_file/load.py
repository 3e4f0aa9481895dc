"""Run files into runs, and back."""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.run_file.command_line import from_command_line
from torchtitan_ext.run_file.layers import COMMAND_LINE, Given, Layer, Place, Problems, from_table, merge, printed
from torchtitan_ext.run_file.schema import OPEN_SECTIONS, SECTIONS, Origins, Run
from torchtitan_ext.run_file.words import describe_error, show
from torchtitan_ext.run_file.yaml_text import YamlTextError, dump, parse_mapping


def load_run(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    known: Mapping[str, Collection[str]] | None = None,
    retired: Mapping[str, Any] | None = None,
) -> Run:
    """Read a run file, the files it extends and the command line's overrides into a checked run.

    Args:
        path: the run file.
        overrides: command-line tokens such as ``["--training.steps", "100", "--training.compile"]``.
        known: the names allowed for a key, such as ``{"model.size": ["10M", "60M"]}``.
        retired: for a run file that an older version recorded, keys which are none any more, each with the value that
            it may have.

    Raises:
        UserError: a file cannot be read, or something in it is wrong. One line names the first problem in reading
            order (the run file, the files it extends, the command line) with file, line and key, and counts the others.
    """
    source = os.fspath(path)
    problems = Problems()
    layer = merge(_read_files(source, problems, retired or {}), from_command_line(overrides, problems))
    whole_file = Place(printed(source), 0)
    layer.setdefault("name", Given(Path(source).stem, whole_file))
    run = _validate(layer, whole_file, known or {}, problems)
    problems.raise_first()
    assert run is not None  # without a problem there is a run
    run._origins = Origins(
        file=str(whole_file),
        places={key: f"{place} --{key}" if place is COMMAND_LINE else str(place) for key, (_, place) in layer.items()},
    )
    return run


def dump_run(run: Run) -> str:
    """Return a run as the text of a run file that loads to an equal run: every key, in the fixed order."""
    return dump(run.model_dump() | {name: dict(sorted(getattr(run, name).items())) for name in OPEN_SECTIONS})


def _read_files(source: str, problems: Problems, retired: Mapping[str, Any]) -> Layer:
    """Read the run file and, one after another, the files it extends."""
    merged: Layer = {}
    chain: dict[str, str] = {}
    subject = printed(source)
    while True:
        text = _read_text(source, subject)
        identity = os.path.realpath(source)
        if identity in chain:
            circle = [*list(chain.values())[list(chain).index(identity) :], printed(source)]
            raise UserError(f"{subject} closes a circle of files that extend each other: {' -> '.join(circle)}")
        file = Place(printed(source), rank=len(chain))
        chain[identity] = file.source
        try:
            layer = from_table(parse_mapping(text), file, problems, retired)
        except YamlTextError as error:
            raise UserError(f"{file.at(error.line)}: {error.problem}") from None
        extends = layer.pop("extends", None)
        if file.rank > 0:
            # Two runs must not write to one folder, so what names a single one is not inherited.
            layer.pop("name", None)
            if "folder" in layer and "{name}" not in str(layer["folder"].value):
                del layer["folder"]
        merged = merge(layer, merged)
        if extends is None:
            return merged
        if not isinstance(extends.value, str):
            raise UserError(f"{extends.place}: extends is {show(extends.value)}; must be the path of one run file")
        subject = f"{extends.place}: extends {show(extends.value)}, which"
        source = os.path.normpath(os.path.join(os.path.dirname(source), extends.value))


def _read_text(source: str, subject: str) -> str:
    try:
        content = Path(source).read_bytes()
    except IsADirectoryError:
        raise UserError(f"{subject} is a folder, not a run file; {_nearest_file(source, '')}") from None
    except (FileNotFoundError, NotADirectoryError):
        folder, name = os.path.split(source)
        raise UserError(f"{subject} does not exist; {_nearest_file(folder, name)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{subject} cannot be read: {reason}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{printed(source)}:{line}: the file is not UTF-8 text; save it as UTF-8") from None


def _nearest_file(folder: str, name: str) -> str:
    """Return a hint at the run files in ``folder``."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder or ".") if entry.name.endswith((".yaml", ".yml")))
    except OSError:
        return f"there is no folder {printed(folder)} either"
    if not names:
        return "there is no .yaml file in that folder"
    return f"did you mean {name + '.yaml'!r}?" if name + ".yaml" in names else nearest(name, names)


def _validate(layer: Layer, whole_file: Place, known: Mapping[str, Collection[str]], problems: Problems) -> Run | None:
    nested: dict[str, Any] = {section: {} for section in SECTIONS}
    for key, given in layer.items():
        section, _, below = key.partition(".")
        if not below:
            nested[key] = given.value
        elif section not in OPEN_SECTIONS or given.value is not None:
            nested[section][below] = given.value
    wrong: dict[str, tuple[Place, str]] = {}
    run = None
    try:
        run = Run.model_validate(nested)
    except ValidationError as error:
        for details in error.errors(include_url=False):
            key = _key(details)
            # A value that fits no member of a union gives one error for each; the schema's own says most.
            if key not in wrong or details["type"] == "problem":
                wrong[key] = _problem(key, details, layer, whole_file)
    for key, names in known.items():
        if key not in layer and key in wrong:
            place, text = wrong[key]
            wrong[key] = place, f"{text}; choose from: {', '.join(names)}"
        elif key in layer and key not in wrong and layer[key].value not in names:
            value, place = layer[key]
            wrong[key] = place, f"{key} {show(value)} is unknown; {nearest(str(value), names)}"
    for place, text in wrong.values():
        problems.add(place, text)
    return run


def _key(details: ErrorDetails) -> str:
    location = [str(part) for part in details["loc"]]
    return ".".join(location[:2]) if location and location[0] in SECTIONS else "".join(location[:1])


def _problem(key: str, details: ErrorDetails, layer: Layer, whole_file: Place) -> tuple[Place, str]:
    keys = details.get("ctx", {}).get("keys") or (key,)
    places = {key: layer[key].place for key in keys if key in layer}
    value = layer[key].value if key in layer else None
    text = describe_error(key, value, details)
    if len(keys) > 1:
        text += "".join(f" ({other}: {places.get(other, 'default')})" for other in keys[1:])
    return places.get(keys[0], whole_file), text
