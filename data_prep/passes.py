"""One pass over a source by worker processes."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import TypeVar

from data_prep.sources import START, Block, Cursor, Source, blocks
from data_prep.workers import ordered_map

Result = TypeVar("Result")


def one_pass(
    source: Source, build: Callable[[], Callable[[Block], Result]], workers: int, start: Cursor = START
) -> Generator[Result, None, None]:
    """Yield ``build()(block)`` for each block of ``source`` from ``start`` on, in order.

    See ``ordered_map``. The source lets go of the files that are done with.
    """
    ends: deque[Cursor] = deque()

    def noted() -> Iterator[Block]:
        for block in blocks(source, start):
            ends.append(block.end)
            yield block

    with closing(ordered_map(build, noted(), workers)) as results:
        for result in results:
            source.release(ends.popleft().part)
            yield result
