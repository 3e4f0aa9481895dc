"""The schema, its values and its errors in plain words."""

from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from torchtitan_ext.errors import nearest
from torchtitan_ext.run_file.schema import OPEN_SECTIONS, fields
from torchtitan_ext.run_file.yaml_text import Table

_OPEN_LABELS = {"depth": "depth.<option>", "attention": "attention.<option>", "groups": "groups.<group>.<setting>"}
_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class KeyHelp(NamedTuple):
    """One key of a run file, for ``--help`` and the reference page."""

    key: str
    type: str
    default: str
    description: str


def describe_schema() -> list[KeyHelp]:
    """Return one row for each key of a run file, in the fixed order of the schema."""
    rows = [KeyHelp("extends", "text", "none", "run file to start from, relative to this one; the keys here win")]
    for key, info in fields().items():
        label = _OPEN_LABELS.get(key, key)
        null = " (or null)" if NoneType in get_args(info.annotation) else ""
        rows.append(KeyHelp(label, describe_type(info) + null, _default(key, info), info.description or ""))
    return rows


def describe_type(info: FieldInfo) -> str:
    """Return the type and limits of a field, such as ``a whole number greater than 0``."""
    return _words(info.annotation, info.metadata)


def describe_error(key: str, given: Any, error: ErrorDetails) -> str:
    """Return one of pydantic's errors about the value ``given`` for ``key`` as a sentence that begins with the key."""
    context = error.get("ctx", {})
    if error["type"] == "problem" and context["whole_sentence"]:
        return str(context["message"])
    # An open section is one field, whose errors name the option next; in a list they name the index.
    top = key.partition(".")[0]
    name = top if top in OPEN_SECTIONS else key
    info = fields()[name]
    if error["type"] == "missing":
        return f"{key} is missing; add it ({info.description})"
    if get_origin(info.annotation) is Literal and isinstance(given, str):
        return f"{key} {show(given)} is unknown; {nearest(given, get_args(info.annotation))}"
    index = error["loc"][-1]
    if isinstance(given, list) and isinstance(index, int):
        key, given = f"{key}[{index}]", given[index]
        info = FieldInfo.from_annotation(get_args(info.annotation)[0])
    if error["type"] == "problem":
        return f"{key} is {show(given)}; {context['message']}"
    quotes = "; put it in quotes" if info.annotation is str and isinstance(given, int | float) else ""
    return f"{key} is {show(given)}; must be {_constraint(context) or describe_type(info)}{quotes}"


def show(value: Any) -> str:
    """Return a value as an error message shows it: short, and on one line."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Table):
        return "a mapping"
    text = f"[{', '.join(show(item) for item in value)}]" if isinstance(value, list) else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-10:]}"


def _constraint(context: dict[str, Any]) -> str:
    """Return the limit that a value broke, from the context that pydantic gives an error about a limit."""
    for name, words in _LIMITS.items():
        if name in context:
            return f"{words} {context[name]:g}"
    return ""


_LIMITS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most", "multiple_of": "a multiple of"}


def _words(annotation: Any, metadata: list[Any]) -> str:
    limits = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            limits += item.metadata
        elif isinstance(item, annotated_types.BaseMetadata):
            limits.append(item)
    limits_in_words = [
        f"{words} {getattr(item, name):g}" for item in limits for name, words in _LIMITS.items() if hasattr(item, name)
    ]
    return " ".join([_kind(annotation), " and ".join(limits_in_words)]).strip()


def _kind(annotation: Any) -> str:
    arguments = get_args(annotation)
    match get_origin(annotation):
        case None:
            return _KINDS[annotation]
        case origin if origin is Annotated:
            return _words(arguments[0], list(arguments[1:]))
        case origin if origin is Literal:
            return f"one of {', '.join(arguments)}"
        case origin if origin is list:
            return f"a list, each {_kind(arguments[0])}"
        case origin if origin is dict:
            return _kind(arguments[1])
    # A union. A whole number is a number, so a union of both needs only the wider word.
    members = [member for member in arguments if member is not NoneType and not (member is int and float in arguments)]
    return ", or ".join(_kind(member) for member in members)


def _default(key: str, info: FieldInfo) -> str:
    if key == "name":
        return "the file's name without its ending"
    if key in OPEN_SECTIONS:
        return "the attention's" if key == "attention" else "the variant's"
    if info.default is PydanticUndefined:
        return "required"
    return "null" if info.default is None else show(info.default).strip("'")
