"""The text that comes with every Python: enough to try everything out without a network."""

import ast
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from data_prep.sources.base import PartFile, Piece, Texts


class BuiltinSource:
    """The language reference behind ``help()`` and the documentation strings of the standard library, in English.

    One document for each topic of ``pydoc_data.topics``, one for each module in the top folder of the standard library.
    """

    parts = 1
    most_workers = 1

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._documents = [*topics.values(), *_module_documentation()]

    @property
    def work(self) -> float:
        return sum(map(len, self._documents))

    def describe(self) -> dict[str, str | int | None]:
        return {"kind": "builtin", "python": platform.python_version(), "text_sha256": self._digest()}

    def files(self) -> list[PartFile]:
        return [PartFile("built-in text", len(self._documents), self._digest())]

    def pieces(self, part: int, place: int = 0) -> Iterator[tuple[Piece, float]]:
        for number in range(place, len(self._documents), 16):
            texts = Texts("built-in text", number, self._documents[number : number + 16])
            yield texts, texts.size

    def release(self, part: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _digest(self) -> str:
        return hashlib.sha256("\0".join(self._documents).encode()).hexdigest()


def _module_documentation() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_bytes())
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        strings = [text for node in nodes if (text := ast.get_docstring(node))]
        if strings:
            yield "\n\n".join(strings)
