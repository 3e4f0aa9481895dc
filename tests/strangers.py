"""The variants of docs/adding-a-variant.md, taken from its text: what somebody writes who has read only that."""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

from torchtitan_ext.depth.variant import Variant

PAGE = Path(__file__).resolve().parent.parent / "docs" / "adding-a-variant.md"


def _variants() -> dict[str, Variant]:
    """The variant of each block of code, by its name as a file would have it."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for source in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
            (name,) = re.findall(r"class (\w+)\(Variant\)", source)
            file = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
            path = Path(folder) / f"{file}.py"
            path.write_text(source, encoding="utf-8")
            spec = importlib.util.spec_from_file_location(file, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[file] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found[file] = getattr(module, name)()
    return found


STRANGERS = _variants()
