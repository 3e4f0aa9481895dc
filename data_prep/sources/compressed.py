"""Files of text, compressed or not, as streams of bytes."""

import io
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from data_prep.sources.base import PIECE_BYTES

CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Suffixes of compressed files and what pyarrow calls their kind."""


def codec(path: Path) -> str | None:
    """What ``path`` is compressed with, by its name."""
    return CODECS.get(path.suffix.lower())


class TextFile:
    """The bytes of a file behind its compression.

    ``place`` counts bytes of text; ``work`` counts bytes of the file.
    """

    def __init__(self, path: Path, place: int) -> None:
        kind = codec(path)
        self._file = open(path, "rb")  # noqa: SIM115  (closed by __exit__)
        self._stream: BinaryIO = self._file
        self._size = path.stat().st_size
        if kind is not None:
            # The codec reads ahead, and has to do so in the file that is asked for its place.
            unpacked = pa.CompressedInputStream(pa.PythonFile(self._file, "r"), kind)
            self._stream = cast(BinaryIO, io.BufferedReader(unpacked, PIECE_BYTES))
            left = place
            while left and (data := self._stream.read(min(left, PIECE_BYTES))):
                left -= len(data)
        else:
            self._file.seek(place)
        self._compressed = kind is not None
        self.place = place

    def __enter__(self) -> "TextFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self.place += len(data)
        return data

    def readline(self) -> bytes:
        data = self._stream.readline()
        self.place += len(data)
        return data

    @property
    def work(self) -> int:
        """How many bytes of the file have been read."""
        return min(self._file.tell(), self._size) if self._compressed else self.place
