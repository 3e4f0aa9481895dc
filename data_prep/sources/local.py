"""Documents from local Parquet, JSON-lines and text files."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from data_prep.sources import jsonlines, parquet, text
from data_prep.sources.base import PIECE_BYTES, PartFile, Piece
from data_prep.sources.choice import JSON_LINES, PARQUET, choose, kind

CHECKS_AT_ONCE = 16


class LocalSource:
    """The documents of local files, each read by what its name ends in; every file is a part.

    Args:
        patterns: paths, folders or globs (``**`` too). Files come in the order of the patterns, sorted within each.
        column: the Parquet column or JSON key that holds the text.
        separator: what separates the documents of a text file, in any style of line ends; ``None`` takes each file as
            one document.
        config: a configuration of a repository's folder.

    Attributes:
        paths: of the files, in order.

    Raises:
        UserError: nothing matches, a file is named twice, is of no known kind, or has no such column.
    """

    def __init__(self, patterns: Sequence[str], column: str, separator: str | None, config: str | None = None) -> None:
        chosen = choose(patterns, config)
        self.paths, self._config, self.notes = chosen.files, chosen.config, chosen.notes
        self._column = column
        self._separator = separator
        self._files = self.files()
        # Opening many files takes long where each of them is far away.
        with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
            for _ in pool.map(self._check, self.paths):
                pass

    @property
    def parts(self) -> int:
        return len(self.paths)

    @property
    def work(self) -> float:
        return sum(file.size for file in self._files)

    @property
    def most_workers(self) -> int:
        return max(1, sum(file.size for file in self._files) // PIECE_BYTES)

    def describe(self) -> dict[str, str | int | None]:
        listing = "".join(f"{file.name}\0{file.size}\n" for file in self._files)
        described: dict[str, str | int | None] = {
            "kind": "files",
            "files": len(self._files),
            "bytes": sum(file.size for file in self._files),
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "text_column": self._column,
            "document_separator": self._separator,
        }
        return described if self._config is None else described | {"config": self._config}

    def files(self) -> list[PartFile]:
        return [PartFile.of(path, path.name) for path in self.paths]

    def pieces(self, part: int, place: int = 0) -> Iterator[tuple[Piece, float]]:
        path = self.paths[part]
        if kind(path) is PARQUET:
            return parquet.pieces(path, self._column, place)
        if kind(path) is JSON_LINES:
            return jsonlines.pieces(path, self._column, place)
        return text.pieces(path, self._separator, place)

    def release(self, part: int) -> None:
        pass

    def close(self) -> None:
        pass

    def _check(self, path: Path) -> None:
        if kind(path) is PARQUET:
            parquet.check(path, self._column)
        elif kind(path) is JSON_LINES:
            jsonlines.check(path, self._column)
        else:
            text.check(path, self._separator)
