"""Documents from local Parquet, JSON-lines and text files."""

import glob
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.sources import jsonlines, parquet, text
from data_prep.sources.base import PIECE_BYTES, Piece
from torchtitan_ext.errors import UserError

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".json", ".ndjson")
TEXT = (".txt", ".text", ".md")


class LocalSource:
    """The documents of local files, each read by what its name ends in; every file is a part.

    Args:
        patterns: paths, folders or globs (``**`` too). Files come in the order of the patterns, sorted within each.
        column: the Parquet column or JSON key that holds the text.
        separator: what separates the documents of a text file; ``None`` takes each file as one document.

    Attributes:
        files: the paths, in order.

    Raises:
        UserError: nothing matches, a file is named twice, is of no known kind, or has no such column.
    """

    def __init__(self, patterns: Sequence[str], column: str, separator: str | None) -> None:
        self.files = list(_expand(patterns))
        self._column = column
        self._separator = separator
        for path in self.files:
            self._check(path)
        self._sizes = [path.stat().st_size for path in self.files]

    @property
    def parts(self) -> int:
        return len(self.files)

    @property
    def work(self) -> float:
        return sum(self._sizes)

    @property
    def most_workers(self) -> int:
        return max(1, sum(self._sizes) // PIECE_BYTES)

    def describe(self) -> dict[str, str | int | None]:
        listing = "".join(f"{path.name}\0{size}\n" for path, size in zip(self.files, self._sizes, strict=True))
        return {
            "kind": "files",
            "files": len(self.files),
            "bytes": sum(self._sizes),
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "text_column": self._column,
            "document_separator": self._separator,
        }

    def pieces(self, part: int) -> Iterator[tuple[Piece, float]]:
        path = self.files[part]
        if path.suffix in PARQUET:
            return parquet.pieces(path, self._column)
        if path.suffix in JSON_LINES:
            return jsonlines.pieces(path, self._column)
        return text.pieces(path, self._separator)

    def _check(self, path: Path) -> None:
        if path.suffix in PARQUET:
            parquet.check(path, self._column)
        elif path.suffix in JSON_LINES:
            jsonlines.check(path, self._column)
        elif path.suffix in TEXT:
            text.check(path, self._separator)
        else:
            known = " ".join(PARQUET + JSON_LINES + TEXT)
            raise UserError(f"{path}: cannot tell what kind of file it is; its name must end in one of {known}")


def _expand(patterns: Sequence[str]) -> Iterator[Path]:
    seen: set[Path] = set()
    for pattern in patterns:
        inside = f"{glob.escape(pattern)}/**" if Path(pattern).is_dir() else pattern
        # A path with brackets in its name is itself before it is a pattern.
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(inside, recursive=True))
        paths = [Path(name) for name in names if Path(name).is_file()]
        if not paths:
            raise UserError(
                f"no file matches {pattern!r}; give paths, folders or globs of local files, 'fineweb-edu' or 'builtin'"
            )
        for path in paths:
            if path.absolute() in seen:
                raise UserError(f"{path} is named twice in the sources; name each file once")
            seen.add(path.absolute())
            yield path
