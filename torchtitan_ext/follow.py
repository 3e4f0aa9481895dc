"""Read a run's record while another process writes it."""

import json
from pathlib import Path
from typing import Any

PROBE = 256
"""Bytes before the place reached that are compared, to see that the record is still the one that was read."""


class Follower:
    """Reads a growing ``metrics.jsonl`` (``path``) piece by piece; a call costs what was added since the last one.

    Lines that are damaged or not yet whole are left out. Nothing is raised when the file is missing or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._before = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return (whether this begins the record anew, the records added since the last call).

        The record begins anew when its run was resumed after a crash and what had been lost was cut off.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset - len(self._before))
                anew = file.read(len(self._before)) != self._before
                if anew:
                    file.seek(0)
                    self._offset, self._before = 0, b""
                added = file.read()
        except OSError:
            return False, []
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._before = (self._before + whole)[-PROBE:]
        return anew, [record for line in whole.splitlines() if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, or not UTF-8
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None
