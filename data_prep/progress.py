"""How far a preparation is, how fast it goes, and how long it will take."""

import time
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

LINE_SECONDS = 10.0


class Progress:
    """A progress bar on a terminal; elsewhere a plain line every ``LINE_SECONDS`` seconds.

    Args:
        work: the whole amount, in any unit.
        done: how much of it an earlier run has done.
        stream: where to show it.
    """

    def __init__(self, work: float, done: float, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._bar = tqdm(
            total=work,
            initial=done,
            file=stream,
            disable=None,  # Off unless the stream is a terminal.
            bar_format="{percentage:3.0f}% |{bar}| {postfix}, {elapsed} elapsed, {remaining} left",
        )
        self._work, self._first, self._done = work, done, done
        self._tokens = 0
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def advance(self, work: float, tokens: int) -> None:
        """Count ``work`` as done, which gave ``tokens`` tokens."""
        self._done += work
        self._tokens += tokens
        now = time.monotonic()
        if self._live:
            self._bar.set_postfix_str(self._speed(now), refresh=False)
            self._bar.update(work)
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            percent = 100 * self._done / self._work
            print(f"{percent:5.1f}% {self._speed(now)}, {self._left(now)} left", file=self._stream, flush=True)

    def _speed(self, now: float) -> str:
        per_second = self._tokens / max(now - self._begin, 1e-9)
        return f"{tqdm.format_sizeof(self._tokens)} tokens, {tqdm.format_sizeof(per_second)} tokens/s"

    def _left(self, now: float) -> str:
        gained = self._done - self._first
        if gained <= 0:
            return "unknown time"
        return tqdm.format_interval((now - self._begin) * (self._work - self._done) / gained)
