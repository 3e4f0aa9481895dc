"""Files on their way from the Hub: several connections fill the files in order, a bounded stretch ahead of the reader.

A file on the disk has its full size from the start, and holes where nothing has come yet. What is read is deleted.
"""

import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from data_prep.sources.base import PartFile
from data_prep.sources.hub_client import HubClient
from data_prep.sources.patience import Interrupted

SEGMENT = 8 << 20
"""Bytes in one request."""
CONNECTIONS = 16
AHEAD = 64
"""Segments that may be there, or on their way, beyond the one that is read."""
CLOSING_SECONDS = 1.0
"""How long to wait for the connections at the end; one that hears nothing from the server ends with the process."""


class Segment(NamedTuple):
    part: int
    start: int
    stop: int


class Downloads:
    """``files`` from number ``first`` on, in order. One thread reads; others download.

    Args:
        client: of the repository; it is stopped with the downloads.
        commit: of the repository.
        files: all files.
        first: the file that is read first.
        folder: for the files; made, and removed by ``close``.
    """

    def __init__(self, client: HubClient, commit: str, files: Sequence[PartFile], first: int, folder: Path) -> None:
        self._client, self._commit, self._files, self._folder = client, commit, files, folder
        self._changed = threading.Condition()
        self._order: Iterator[Segment] = iter(())
        self._there: set[Segment] = set()
        self._issued = self._wanted = 0
        self._numbers: dict[Segment, int] = {}
        self._error: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._released = first
        self.next = first
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def path(self, part: int) -> Path:
        return self._folder / f"{part:05d}.parquet"

    def fetch_footer(self, part: int) -> None:
        """Put the end of file ``part`` in its place."""
        data = self._client.footer(self._commit, self._files[part])
        self._write(Segment(part, self._files[part].size - len(data), self._files[part].size), iter([data]))

    def begin(self, part: int, first_byte: int) -> None:
        """Start to download, unless that has happened, with byte ``first_byte`` of file ``part``."""
        self.next = part + 1
        if not self._threads:
            self._order = self._segments(part, first_byte)
            self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(CONNECTIONS)]
            for thread in self._threads:
                thread.start()

    def wait(self, part: int, start: int, stop: int) -> None:
        """Wait until bytes ``start`` to ``stop`` of file ``part`` are there. Raises what a download failed with."""
        for begin in range(start - start % SEGMENT, stop, SEGMENT):
            segment = Segment(part, begin, min(begin + SEGMENT, self._files[part].size))
            with self._changed:
                while segment not in self._there:
                    if self._error is not None:
                        raise self._error
                    number = self._numbers.get(segment, self._issued)
                    # Few at first: the reader may want no more than the beginning.
                    if number >= self._wanted:
                        self._wanted = number + 1
                        self._changed.notify_all()
                    self._changed.wait()

    def release(self, part: int) -> None:
        """Delete the files before ``part``."""
        while self._released < part:
            self.path(self._released).unlink(missing_ok=True)
            self._released += 1

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._client.close()
        deadline = time.monotonic() + CLOSING_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _segments(self, part: int, first_byte: int) -> Iterator[Segment]:
        for number in range(part, len(self._files)):
            size = self._files[number].size
            begin = 0 if number > part else size if first_byte >= size else first_byte - first_byte % SEGMENT
            for start in range(begin, size, SEGMENT):
                yield Segment(number, start, min(start + SEGMENT, size))

    def _work(self) -> None:
        try:
            while (segment := self._take()) is not None:
                data = self._client.read(self._commit, self._files[segment.part].name, segment.start, segment.stop)
                self._write(segment, data)
                with self._changed:
                    self._there.add(segment)
                    self._changed.notify_all()
        except Interrupted:
            pass
        except Exception as error:
            with self._changed:
                if not self._closed:
                    self._error = self._error or error
                self._changed.notify_all()

    def _take(self) -> Segment | None:
        with self._changed:
            # The stretch ahead grows with what has been read.
            while not self._closed and self._issued >= self._wanted + min(AHEAD, 2 * self._wanted):
                self._changed.wait()
            segment = None if self._closed else next(self._order, None)
            if segment is not None:
                self._numbers[segment] = self._issued
                self._issued += 1
            return segment

    def _write(self, segment: Segment, data: Iterator[bytes]) -> None:
        file = os.open(self.path(segment.part), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, self._files[segment.part].size)
            at = segment.start
            for chunk in data:
                written = 0
                while written < len(chunk):
                    written += os.pwrite(file, chunk[written:], at + written)
                at += len(chunk)
        finally:
            os.close(file)
