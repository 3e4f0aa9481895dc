"""Documents from plain text files: the whole file, or what lies between separators."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.sources.base import PIECE_BYTES
from torchtitan_ext.errors import UserError

WHOLE_FILE_LIMIT = 64 << 20
"""Bytes. A longer document would be held in memory many times over while it is tokenised."""


@dataclass(frozen=True)
class RawTexts:
    """A piece held as undecoded documents that start at byte ``offset`` of the file."""

    path: Path
    offset: int
    documents: list[bytes]

    @property
    def where(self) -> str:
        return f"{self.path}, from byte {self.offset}"

    @property
    def size(self) -> int:
        return sum(map(len, self.documents))

    def texts(self) -> list[str]:
        try:
            return [document.decode() for document in self.documents]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.where}: not UTF-8 ({error.reason}); convert the file, for example with iconv"
            ) from error


def check(path: Path, separator: str | None) -> None:
    """Raise ``UserError`` when the file would be one document too long to tokenise at once."""
    size = path.stat().st_size
    if separator is None and size > WHOLE_FILE_LIMIT:
        raise UserError(
            f"{path} would be one document of {size / 2**20:.0f} MiB, and the limit is {WHOLE_FILE_LIMIT >> 20} MiB; "
            "say what separates its documents with --document-separator, for example '\\n\\n'"
        )


def pieces(path: Path, separator: str | None) -> Iterator[tuple[RawTexts, float]]:
    """Read the file in runs of whole documents. Work is counted in bytes."""
    if separator is None:
        data = path.read_bytes()
        yield RawTexts(path, 0, [data]), len(data)
        return
    mark = separator.encode()
    rest, offset = b"", 0
    with open(path, "rb") as file:
        while data := file.read(PIECE_BYTES):
            *documents, rest = (rest + data).split(mark)
            if len(rest) > WHOLE_FILE_LIMIT:
                start = offset + sum(map(len, documents)) + len(mark) * len(documents)
                raise UserError(
                    f"{path}: the document from byte {start} is longer than {WHOLE_FILE_LIMIT >> 20} MiB; "
                    f"check --document-separator, now {separator!r}"
                )
            yield RawTexts(path, offset, documents), len(data)
            offset += sum(map(len, documents)) + len(mark) * len(documents)
    if rest:
        yield RawTexts(path, offset, [rest]), 0.0
