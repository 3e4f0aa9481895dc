"""Keys of a planned run: as the command line's tokens, and as a run, with errors that point at the study."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_ext.errors import UserError
from torchtitan_ext.resolve import KNOWN_NAMES, ResolvedRun, planned_dataset, resolve
from torchtitan_ext.run_file import Run, load_run
from torchtitan_ext.run_file.schema import BUDGETS, fields
from torchtitan_ext.run_file.yaml_text import YamlTextError, parse_value

_GIVEN = re.compile(r"command line:? --(?P<key>[^\s:]+):?|\((?P<other>[\w.]+): command line\)")
"""How errors about a run name a key that the command line gave."""


@dataclass(frozen=True)
class Launch:
    """What the runs of a study are planned for.

    Attributes:
        ranks: processes of each run.
        vocab_size: of a data set that is not prepared yet; None: the data set is there.
    """

    ranks: int
    vocab_size: int | None = None


@dataclass(frozen=True)
class RunKeys:
    """What a planned run sets over its base run file: values by run key, and where the study gives each."""

    values: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)

    def with_values(self, values: Mapping[str, Any], place: str) -> "RunKeys":
        """These keys and ``values``, all given at ``place``; a length of the run replaces any other kind of length."""
        kept = dict(self.values)
        if any(values.get(key) is not None for key in BUDGETS):
            kept = {key: value for key, value in kept.items() if key not in BUDGETS}
        return RunKeys({**kept, **values}, {**self.places, **dict.fromkeys(values, place)})

    def tokens(self) -> tuple[str, ...]:
        """As arguments of `torchtitan_ext.train`."""
        return tuple(token for key, value in self.values.items() for token in (f"--{key}", text_of(key, value)))

    def load(self, base: Path) -> Run:
        """The run file ``base`` with these keys. Raises ``UserError``, pointing at the study for a key from it."""
        try:
            return load_run(base, self.tokens(), known=KNOWN_NAMES)
        except UserError as error:
            raise UserError(self.in_study(str(error))) from None

    def resolve(self, run: Run, launch: Launch) -> ResolvedRun:
        """``run``, which these keys gave, with nothing left open. Raises ``UserError`` in the same way."""
        try:
            return resolve(run, launch.ranks, planned_dataset(run, launch.vocab_size))
        except UserError as error:
            raise UserError(self.in_study(str(error))) from None

    def in_study(self, message: str) -> str:
        """An error message about the run, with the study's places for the command line's."""

        def place(found: re.Match[str]) -> str:
            if found["other"]:
                return f"({found['other']}: {self.places.get(found['other'], 'the study')})"
            where = self.places.get(found["key"], "the study")
            return f"{where}:" if found[0].endswith(":") else f"{where}: {found['key']}"

        return _GIVEN.sub(place, message)


def text_of(key: str, value: Any) -> str:
    """Return ``value`` as the command line takes it for ``key``."""
    if not isinstance(value, str):
        return json.dumps(value)  # numbers, true, false, null and lists are written alike in YAML
    if key in fields() and fields()[key].annotation is str and not value.startswith(("'", '"')):
        return value
    try:
        plain = parse_value(value) == value
    except YamlTextError:
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)
