"""What is wrong in a study file, in plain words."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from torchtitan_ext.errors import nearest
from torchtitan_ext.run_file.layers import printed
from torchtitan_ext.run_file.words import describe_type, show
from torchtitan_ext.study.schema import Study
from torchtitan_ext.study.yaml_lines import Location


def key_name(location: Location) -> str:
    """Return a location as people write it: ``variants[2].depth``."""
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return printed(name.removeprefix("."))


def key_location(location: Location) -> Location:
    """Return the part of pydantic's location that the file has: without the member of a union that was tried."""
    for length in range(1, len(location)):
        annotation = _unwrapped(_info(location[:length]).annotation)
        if get_origin(annotation) in (Union, UnionType):
            return location[:length]
    return location


def describe(details: ErrorDetails) -> str:
    """Return one of pydantic's errors about a study as a sentence that begins with the key."""
    location = key_location(details["loc"])
    key, given = key_name(location), details["input"]
    match details["type"]:
        case "extra_forbidden":
            model = _model(location[:-1])
            return f"{key} is not a key; {nearest(str(location[-1]), model.model_fields)}"
        case "missing":
            info = _model(location[:-1]).model_fields[str(location[-1])]
            return f"{key} is missing; add it ({info.description})"
        case "problem":
            return f"{key} is {_show(given)}; {details['ctx']['message']}"
        case "too_short":
            return f"{key} is empty; give at least one"
        case "literal_error" if isinstance(given, str):
            return f"{key} {show(given)} is unknown; {nearest(given, get_args(_info(location).annotation))}"
    return f"{key} is {_show(given)}; must be {_type(location)}"


def _show(value: Any) -> str:
    if not isinstance(value, dict):
        return show(value)
    text = "{" + ", ".join(f"{printed(key)}: {_show(item)}" for key, item in value.items()) + "}"
    return text if len(text) <= 80 else f"{text[:76]}...}}"


def _type(location: Location) -> str:
    return _type_of(_info(location))


def _type_of(info: FieldInfo) -> str:
    annotation = _unwrapped(info.annotation)
    members = [FieldInfo.from_annotation(member) for member in get_args(annotation) if member is not NoneType]
    if any(get_origin(member.annotation) is dict for member in members):
        return " or ".join(map(_type_of, members))
    if get_origin(annotation) is list:
        return "a list, written [a, b] or one '- a' a line"
    if get_origin(annotation) is dict:
        return "a mapping, with its keys on indented lines below it"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with keys of {', '.join(annotation.model_fields)}"
    return "the path of a folder" if annotation is Path else describe_type(info)


def _model(location: Location) -> type[BaseModel]:
    """The model of the mapping at ``location``."""
    if not location:
        return Study
    annotation = _unwrapped(_info(location).annotation)
    assert issubclass(annotation, BaseModel), location
    return annotation


def _info(location: Location) -> FieldInfo:
    """The field at ``location``; for an index, that of the list's items, for a key of a dict, that of its values."""
    info = Study.model_fields[str(location[0])]
    for part in location[1:]:
        annotation = _unwrapped(info.annotation)
        if get_origin(annotation) in (list, dict):
            info = FieldInfo.from_annotation(get_args(annotation)[-1])
        else:
            info = annotation.model_fields[str(part)]
    return info


def _unwrapped(annotation: Any) -> Any:
    """A type without ``| None`` and ``Annotated``."""
    while True:
        members = [member for member in get_args(annotation) if member is not NoneType]
        optional = get_origin(annotation) in (Union, UnionType) and len(members) == 1
        if not optional and get_origin(annotation) is not Annotated:
            return annotation
        annotation = members[0]
