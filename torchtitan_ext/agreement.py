"""Work that the ranks of a launch share, and that succeeds on all of them or fails on all of them.

A rank that raised alone would leave the others waiting for it.
"""

import platform
from collections.abc import Callable
from typing import Any, TypeVar

from torchtitan_ext.errors import SharedError, UserError

Result = TypeVar("Result")
Gather = Callable[[Any], list[Any]]
"""Gives every rank the values of all ranks, in order. Collective."""


def alone(mine: Any) -> list[Any]:
    """``Gather`` for a process without others."""
    return [mine]


def together(gather: Gather, work: Callable[[], Result]) -> list[Result]:
    """Do ``work`` on every rank and return all ranks' results, in order. Collective.

    Raises:
        SharedError: on every rank, with each ``UserError`` that a rank raised.
        RuntimeError: on the other ranks, where ``work`` raised anything else on one; that rank raises what it was.
    """
    result, mistake, failure = None, None, None
    try:
        result = work()
    except UserError as error:
        mistake = str(error)
    except Exception as error:
        failure = error
    host = platform.node()
    said = gather((result, mistake, f"{type(failure).__name__}: {failure}" if failure else None, host))
    if failure is not None:
        raise failure
    several = len({host for *_, host in said}) > 1
    mistakes = [
        f"{mistake} (rank {rank} on {host})" if several else mistake
        for rank, (_, mistake, _, host) in enumerate(said)
        if mistake is not None
    ]
    if mistakes:
        raise SharedError("\n".join(dict.fromkeys(mistakes)))
    for rank, (_, _, failed, host) in enumerate(said):
        if failed is not None:
            raise RuntimeError(f"rank {rank} on {host} failed: {failed}")
    return [result for result, *_ in said]


def by_first(gather: Gather, rank: int, work: Callable[[], Result]) -> Result:
    """Do ``work`` on the first rank and return its result on every rank. Collective; raises as ``together`` does."""
    result = together(gather, lambda: work() if rank == 0 else None)[0]
    return result  # type: ignore[return-value]
