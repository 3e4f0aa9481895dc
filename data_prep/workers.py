"""A bounded, ordered map over worker processes."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from torchtitan_ext.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

BLOCKS_PER_WORKER = 4
"""How many items wait for, or are in, each worker: enough to keep it busy, few enough to bound the memory."""

_function: Callable[[Any], Any]


def ordered_map(
    build: Callable[[], Callable[[Item], Result]], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Yield ``build()(item)`` for each item, in order, computed by ``workers`` processes that call ``build`` once each.

    With one worker the calling process does the work. ``items`` is read no further ahead than the workers need.

    Raises:
        UserError: a worker process died. What ``build`` and its function raise comes through unchanged.
    """
    if workers == 1:
        yield from map(build(), items)
        return
    # A child that shares this process's locks and threads can hang, so each one starts afresh.
    context = multiprocessing.get_context("spawn")
    stopped, stop = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _start, (build, stopped))
    finished = False
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(_submit(pool, item))
            while len(pending) == workers * BLOCKS_PER_WORKER or (pending and pending[0].done()):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        finished = True
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process died, most likely for lack of memory; "
            f"run the same command again with fewer --workers than {workers} to continue"
        ) from error
    finally:
        if not finished:
            # Nobody waits for what they are at, which can take long.
            stop.close()
        pool.shutdown(cancel_futures=True)
        stop.close()
        stopped.close()


def _submit(pool: ProcessPoolExecutor, item: Item) -> "Future[Any]":
    # Ctrl-C goes to every process of the terminal. The workers inherit the mask, so that it reaches this process only.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(_call, item)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(build: Callable[[], Callable[[Any], Any]], stopped: Connection) -> None:
    global _function
    threading.Thread(target=_exit_when_told, args=(stopped,), daemon=True).start()
    _function = build()


def _exit_when_told(stopped: Connection) -> None:
    """End this process when the pipe is closed, or its parent is gone: killed outright, that cannot say so itself."""
    parent = multiprocessing.parent_process()
    wait([stopped] if parent is None else [stopped, parent.sentinel])
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)
