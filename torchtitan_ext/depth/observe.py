"""Looking inside a model while it runs: variants note what they compute, and someone may be listening.

A note costs nothing when nobody listens: its value is not even computed. Notes are taken in eager mode only, so
compiled graphs never contain one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_notes: dict[str, list[torch.Tensor]] | None = None


def note(name: str, value: Callable[[], torch.Tensor]) -> None:
    """Note ``value()`` under ``name``, one note per layer or read in order of depth: a scalar, or a vector for a row of
    a map. Averages over batch and tokens are the caller's to take."""
    if _notes is not None:
        _notes.setdefault(name, []).append(value().detach())


@contextmanager
def listening() -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect what is noted inside, by name, with compiled code run eagerly."""
    global _notes
    _notes = {}
    try:
        with torch.compiler.set_stance("force_eager"):
            yield _notes
    finally:
        _notes = None
