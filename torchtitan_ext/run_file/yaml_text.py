"""YAML text with line numbers, read the way people expect of a settings file.

PyYAML reads YAML 1.1, where ``1e-3`` is text, ``no`` is false, ``010`` is eight and the last of two equal keys wins.
Here the plain scalars of YAML 1.2's core schema hold (https://yaml.org/spec/1.2.2/#103-core-schema), with ``_`` allowed
between the digits of a number and without hexadecimal, octal, infinity and not-a-number; both of two equal keys are
kept for the caller to report; and anchors, aliases and tags are refused.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

import yaml

_DIGITS = "[0-9](?:_?[0-9])*"
_INT = re.compile(r"[-+]?(?:0|[1-9](?:_?[0-9])*)\Z")
_FLOAT = re.compile(rf"[-+]?(?:{_DIGITS}\.(?:{_DIGITS})?|\.{_DIGITS}|{_DIGITS}(?=[eE]))(?:[eE][-+]?[0-9]+)?\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Pair:
    """One ``key: value`` of a mapping. ``value`` is a scalar, a list or a :class:`Table`; ``line`` counts from 1."""

    key: str
    line: int
    value: Any


@dataclass(frozen=True)
class Table:
    """A mapping, with its pairs in file order and repeated keys kept."""

    pairs: tuple[Pair, ...]


class YamlTextError(Exception):
    """The text is not YAML that a run or study file may hold: ``line`` counts from 1, ``problem`` is one sentence."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(line, problem)
        self.line = line
        self.problem = problem


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        event = cast(Any, self).peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise YamlTextError(event.start_mark.line + 1, "anchors (&) and aliases (*) are not used; repeat the value")
        if getattr(event, "tag", None) is not None:
            raise YamlTextError(event.start_mark.line + 1, "tags (!) are not used; quote text that starts with '!'")
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(f"{_TAG}null", _NULL, ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", _BOOL, list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


class _Dumper(yaml.SafeDumper):
    """Quotes text that either YAML 1.1 or this module would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+.0123456789"))


def parse_mapping(text: str) -> Table:
    """Parse a whole file whose top level is a mapping.

    Raises:
        YamlTextError: the text is not YAML, holds nothing, or its top level is not a mapping.
    """
    node = _compose(text)
    if node is None:
        raise YamlTextError(1, "the file is empty; it needs keys with values, written 'key: value'")
    value = _value(node)
    if not isinstance(value, Table):
        raise YamlTextError(node.start_mark.line + 1, "the top level must be keys with values, written 'key: value'")
    return value


def parse_value(text: str, mapping: bool = False) -> Any:
    """Parse one value from the command line: a plain scalar, a quoted text or a ``[list]``.

    Only text that starts with a quote or a bracket is parsed as YAML, so that paths with ``: ``, ``#`` or ``{`` need
    no second layer of quotes. ``mapping``: a ``{mapping}`` is parsed, too, for a key that takes no text.

    Raises:
        YamlTextError: the quotes, brackets or braces do not match.
    """
    if text[:1] in ("[", '"', "'") or (mapping and text[:1] == "{"):
        return _value(_compose(text))
    return _scalar(cast(Any, _Loader("")).resolve(yaml.ScalarNode, text, (True, False)), text)


def dump(data: dict[str, Any]) -> str:
    """Return ``data`` as YAML in its own key order, without aliases, one key a line."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=2**31, default_flow_style=False)


def _compose(text: str) -> Any:
    try:
        return _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = str(error.problem)
        if mark is not None and mark.buffer is not None and mark.buffer[mark.pointer] == "\t":
            raise YamlTextError(line, "a tab stands where YAML allows only spaces; use spaces") from None
        if isinstance(error, yaml.composer.ComposerError):
            problem = "a second document starts here; a file holds one"
        raise YamlTextError(line, f"not valid YAML: {problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlTextError(line, f"the control character {chr(int(error.character))!r} is not allowed") from None
    except RecursionError:
        raise YamlTextError(1, "lists or mappings are nested too deeply") from None
    except (ValueError, OverflowError) as error:
        # PyYAML lets chr() fail on escapes such as "\UFFFFFFFF" without saying where.
        raise YamlTextError(1, f"not valid YAML: {error}") from None


def _value(node: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        return Table(tuple(_pair(key, value) for key, value in node.value))
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    return _scalar(node.tag, node.value)


def _pair(key: Any, value: Any) -> Pair:
    line = key.start_mark.line + 1
    if not isinstance(key, yaml.ScalarNode):
        raise YamlTextError(line, "a key must be a plain word, not a list or a mapping")
    return Pair(key.value, line, _value(value))


def _scalar(tag: str, text: str) -> Any:
    kind = tag.removeprefix(_TAG)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    digits = text.replace("_", "")
    if kind == "float":
        return float(digits)
    # Python refuses to convert thousands of digits; no key takes a number that long, so it stays text.
    if kind == "int" and len(digits) <= 100:
        return int(digits)
    return text
