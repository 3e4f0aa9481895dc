"""Keys given on the command line: ``--section.key value`` or ``--section.key=value``."""

from collections.abc import Sequence

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_file.layers import COMMAND_LINE, Given, Layer, Problems, is_key, printed, unknown_key
from torchtitan_ext.run_file.schema import SECTIONS, fields
from torchtitan_ext.run_file.yaml_text import YamlTextError, parse_value


def from_command_line(tokens: Sequence[str], problems: Problems) -> Layer:
    """Return the keys that ``tokens`` give; of two values for one key the last one counts.

    A switch needs no value: ``--training.compile`` means true. Other values are read as in a run file.

    Raises:
        UserError: a token is neither an option nor the value of one.
    """
    layer: Layer = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--") or token == "--":
            raise UserError(f"command line: {printed(token)} is not an option; write --section.key value")
        key, equals, text = token.removeprefix("--").partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            equals, text = " ", rest.pop(0)
        if key in SECTIONS:
            problems.add(COMMAND_LINE, f"{key} is a section; write --{key}.key value")
        elif key == "extends":
            problems.add(COMMAND_LINE, "extends can only be given in a run file")
        elif not is_key(key):
            problems.add(COMMAND_LINE, unknown_key(key, "--"))
        elif equals:
            layer[key] = Given(_parse(key, text), COMMAND_LINE)
        elif key in fields() and fields()[key].annotation is bool:
            layer[key] = Given(True, COMMAND_LINE)
        else:
            problems.add(COMMAND_LINE, f"{key} needs a value; write --{key} value")
    return layer


def _parse(key: str, text: str) -> object:
    if key in fields() and fields()[key].annotation is str and not text.startswith(("'", '"')):
        return text  # a name or a path that looks like a number needs no quotes here
    try:
        return parse_value(text)
    except YamlTextError as error:
        raise UserError(f"command line: --{key} {printed(text)}: {error.problem}") from None
