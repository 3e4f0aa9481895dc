"""A folder to write run files in, which is the current folder while a test runs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from torchtitan_ext.errors import UserError
from torchtitan_ext.run_file import Run, load_run

# Six lines, so that a test's own lines begin with line 7, inside the section training.
BASE = """\
model:
  size: 10M
data:
  path: prepared/tiny
training:
  steps: 5
"""


@pytest.fixture
def base() -> str:
    return BASE


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Write ``text`` to ``x.yaml`` and load it."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(text: str | bytes, *overrides: str, known: Mapping[str, Sequence[str]] | None = None) -> Run:
        Path("x.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return load_run("x.yaml", overrides, known)

    return write_and_load


@pytest.fixture
def message(load: Callable[..., Run]) -> Callable[..., str]:
    """Write ``text`` to ``x.yaml``, load it, and return the one line of the error."""

    def error_of(text: str | bytes, *overrides: str, known: Mapping[str, Sequence[str]] | None = None) -> str:
        with pytest.raises(UserError) as error:
            load(text, *overrides, known=known)
        line = str(error.value)
        assert line.splitlines() == [line]
        return line

    return error_of
