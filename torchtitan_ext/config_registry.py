"""Where ``--module torchtitan_ext --config NAME`` looks a configuration up: NAME is a run file's name in
``train_configs/``.

torchtitan takes dashes and slashes in a function's name badly, so the names here are the file names without ``.yaml``,
with other characters than letters and digits turned into underscores.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_ext.shipped import RUN_FILES


def _names() -> dict[str, Path]:
    return {re.sub(r"\W", "_", path.stem): path for path in sorted(RUN_FILES.glob("*.yaml"))}


def __dir__() -> list[str]:
    return list(_names())


def __getattr__(name: str) -> Callable[[], Any]:
    path = _names().get(name)
    if path is None:
        raise AttributeError(name)

    def configuration() -> Any:
        from torchtitan_ext.resolve import load_resolved
        from torchtitan_ext.titan.config import trainer_config

        return trainer_config(load_resolved(str(path), []))

    return configuration
