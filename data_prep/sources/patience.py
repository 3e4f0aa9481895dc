"""Requests to a server that may be busy, out of reach for a moment, or counting requests.

A refusal for too many requests (HTTP 429) is waited out for as long as the server asks, and the user is told. Other
failures of the server or the network are tried again a few times.
"""

import random
import re
import sys
import threading
import time
from collections.abc import Mapping

import httpx
from tqdm import tqdm

from torchtitan_ext.errors import UserError

TRIES = 7
"""Failures in a row, without a byte of progress, after which a request is given up."""
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
RATE_LIMIT_PATIENCE = 3600.0
"""Seconds of nothing but refusals for too many requests after which they are taken to be for good."""
TEMPORARY = (408, 425, 500, 502, 503, 504)
TIMEOUT = httpx.Timeout(30.0, connect=10.0)


class Interrupted(Exception):
    """The wait was called off by ``Patience.stop``."""


class Patience:
    """What all requests to one server share: when the next one is welcome. Used by several threads.

    Args:
        what: what is being asked for, for the messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._welcome = 0.0
        self._refused_since: float | None = None
        self._refusals = 0

    def stop(self) -> None:
        """End all waits."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def wait_until_welcome(self) -> None:
        """Wait as long as the server has asked for. Raises ``Interrupted`` when called off."""
        while True:
            with self._lock:
                left = self._welcome - time.monotonic()
            if left <= 0 and not self.stopped:
                return
            self._pause(left)

    def succeeded(self) -> None:
        with self._lock:
            self._refused_since, self._refusals = None, 0

    def refused(self, headers: Mapping[str, str]) -> None:
        """Take note of HTTP 429. Raises ``UserError`` when there has been nothing else for too long."""
        now = time.monotonic()
        with self._lock:
            if now < self._welcome:
                return  # Another request was refused meanwhile, and that has been said.
            self._refused_since = now if self._refused_since is None else self._refused_since
            if now - self._refused_since > RATE_LIMIT_PATIENCE:
                raise UserError(
                    f'{self._what}: the server has answered nothing but "too many requests" (HTTP 429) for '
                    f"{RATE_LIMIT_PATIENCE / 60:.0f} minutes; run the same command again later to continue"
                )
            seconds = _asked_for(headers)
            if seconds is None:
                seconds = min(LONGEST_WAIT, FIRST_WAIT * 2**self._refusals)
            self._refusals += 1
            self._welcome = now + seconds
        _say(
            f"{self._what}: the server asks to wait (HTTP 429, too many requests); waiting {seconds:.0f} s. "
            "Ctrl-C leaves; the same command continues later"
        )

    def failed(self, tries: int, reason: str) -> None:
        """Wait after failure number ``tries`` in a row. Raises ``UserError`` after too many, ``Interrupted``."""
        if tries >= TRIES:
            raise UserError(
                f"{self._what} failed {tries} times ({reason}); check the network, and run the same command again "
                "to continue"
            )
        seconds = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1)) * random.uniform(0.8, 1.2)
        if tries > 1:
            _say(f"{self._what}: {reason}; trying again in {seconds:.0f} s")
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        if self._stopped.wait(max(0.0, seconds)):
            raise Interrupted


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _asked_for(headers: Mapping[str, str]) -> float | None:
    """Seconds from ``Retry-After``, or from ``RateLimit`` (IETF draft: ``"api";r=0;t=55``)."""
    after = headers.get("retry-after", "").strip()
    if after.isdecimal():
        return min(float(after), RATE_LIMIT_PATIENCE)
    reset = re.search(r";\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    return min(float(reset[1]) + 1, RATE_LIMIT_PATIENCE) if reset else None


def _say(message: str) -> None:
    # A progress bar may be on the screen.
    tqdm.write(message, file=sys.stderr)
    sys.stderr.flush()
