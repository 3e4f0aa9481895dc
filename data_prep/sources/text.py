"""Documents from plain text files: the whole file, or what lies between separators."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data_prep.sources.base import PIECE_BYTES, BadRow, Piece
from data_prep.sources.compressed import TextFile
from torchtitan_ext.errors import UserError

WHOLE_FILE_LIMIT = 64 << 20
"""Bytes. A longer document would be held in memory many times over while it is tokenised."""


@dataclass(frozen=True)
class RawTexts(Piece):
    """A piece held as undecoded documents, with the place where each begins and the one behind its separator."""

    path: Path
    documents: list[bytes]
    begins: list[int]
    behind: list[int]

    @property
    def size(self) -> int:
        return sum(map(len, self.documents))

    @property
    def end(self) -> int:
        return self.behind[-1]

    def rows(self) -> Sequence[str | BadRow]:
        return [_text(document) for document in self.documents]

    def where(self, index: int) -> str:
        return f"{self.path}, the document from byte {self.begins[index]}"

    def ends(self) -> Sequence[int]:
        return self.behind


def check(path: Path, separator: str | None) -> None:
    """Raise ``UserError`` when the file would be one document too long to tokenise at once."""
    if separator is None and path.stat().st_size > WHOLE_FILE_LIMIT:
        raise _too_long(path, separator, 0)


def pieces(path: Path, separator: str | None, place: int = 0) -> Iterator[tuple[Piece, float]]:
    """Read the file from byte ``place`` in runs of whole documents. Work is counted in bytes."""
    mark = None if separator is None else _mark(separator)
    rest, begin = b"", place
    with TextFile(path, place) as file:
        done = file.work
        try:
            while data := file.read(PIECE_BYTES):
                rest += data
                if mark is not None:
                    texts = _split(path, rest, begin, mark)
                    if texts.documents:
                        yield texts, file.work - done
                        done = file.work
                        rest, begin = rest[texts.end - begin :], texts.end
                if len(rest) > WHOLE_FILE_LIMIT:
                    raise _too_long(path, separator, begin)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error}); download it again and run the same command again to continue"
            ) from error
        if rest:
            yield RawTexts(path, [rest], [begin], [begin + len(rest)]), file.work - done


def _mark(separator: str) -> tuple[bytes, re.Pattern[bytes]]:
    """Return the separator with the line ends of Unix, and a pattern that takes those of Windows too."""
    plain = separator.replace("\r\n", "\n").encode()
    return plain, re.compile(re.escape(plain).replace(b"\\\n", b"\r?\n"))


def _split(path: Path, data: bytes, begin: int, mark: tuple[bytes, re.Pattern[bytes]]) -> RawTexts:
    """Cut ``data``, which lies at byte ``begin``, behind each separator; what comes behind the last is left out."""
    plain, pattern = mark
    texts = RawTexts(path, [], [], [])
    if b"\r" in data:
        found = [(match.start(), match.end()) for match in pattern.finditer(data)]
    else:
        found, end = [], 0
        for document in data.split(plain)[:-1]:
            found.append((end + len(document), end + len(document) + len(plain)))
            end = found[-1][1]
    at = 0
    for start, end in found:
        texts.documents.append(data[at:start])
        texts.begins.append(begin + at)
        texts.behind.append(begin + end)
        at = end
    return texts


def _too_long(path: Path, separator: str | None, begin: int) -> UserError:
    limit = f"{WHOLE_FILE_LIMIT >> 20} MiB"
    if separator is None:
        return UserError(
            f"{path} would be one document of more than {limit}; "
            "say what separates its documents with --document-separator, for example '\\n\\n'"
        )
    return UserError(
        f"{path}: the document from byte {begin} is longer than {limit}; check --document-separator, now {separator!r}"
    )


def _text(document: bytes) -> str | BadRow:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8 ({error.reason}); convert the file, for example with iconv")
