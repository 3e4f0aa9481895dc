"""Documents from one string column of a Parquet file.

Row groups of ordinary size are read by the process that tokenises them: what is handed to it is where they are. Only a
row group that is too large to be decoded again for each of its pieces is read here, and its slices are copied out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.base import PIECE_BYTES, BadRow, Piece
from torchtitan_ext.errors import UserError, nearest

GROUP_BYTES = 8 * PIECE_BYTES
"""Row groups with more text than this are decoded once, by the reading process."""


@dataclass(frozen=True)
class Span:
    """Rows ``row`` to ``row + rows`` of a file: the ``rows`` behind the first ``skip`` of row groups ``groups``.

    ``size`` is roughly how many bytes of text they hold.
    """

    row: int
    rows: int
    groups: tuple[int, ...]
    skip: int
    size: int


@dataclass(frozen=True)
class ParquetRows(Piece):
    """A piece that is read from ``path`` when its rows are asked for; a null counts as an empty document.

    ``stamp`` tells files that had the same path one after another apart.
    """

    path: Path
    stamp: int
    column: str
    name: str
    span: Span

    @property
    def size(self) -> int:
        return self.span.size

    @property
    def end(self) -> int:
        return self.span.row + self.span.rows

    def rows(self) -> Sequence[str | BadRow]:
        column = _read_groups(self.path, self.stamp, self.column, self.name, self.span.groups)
        return _decode(column.slice(self.span.skip, self.span.rows))

    def where(self, index: int) -> str:
        return _where(self.name, self.span.row + index)

    def ends(self) -> Sequence[int]:
        return range(self.span.row + 1, self.end + 1)


@dataclass(frozen=True)
class ArrowTexts(Piece):
    """A piece that holds its rows, ``data`` as an Arrow stream; a null counts as an empty document."""

    name: str
    row: int
    count: int
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    @property
    def end(self) -> int:
        return self.row + self.count

    def rows(self) -> Sequence[str | BadRow]:
        with pa.ipc.open_stream(self.data) as stream:
            return _decode(stream.read_all().column(0))

    def where(self, index: int) -> str:
        return _where(self.name, self.row + index)

    def ends(self) -> Sequence[int]:
        return range(self.row + 1, self.end + 1)


def check(path: Path, column: str) -> None:
    """Raise ``UserError`` unless ``path`` is a Parquet file with a string column named ``column``."""
    check_schema(str(path), read_schema(path), column)


def read_schema(path: Path) -> pa.Schema:
    """Raises ``UserError`` when ``path`` is no Parquet file."""
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable Parquet file; download it again or leave it out") from error


def check_schema(name: str, schema: pa.Schema, column: str) -> None:
    """Raise ``UserError`` unless there is one string column named ``column``."""
    if column not in schema.names:
        raise UserError(f"{name} has no column {column!r}; {nearest(column, schema.names)} Give it with --text-column")
    if schema.names.count(column) > 1:
        raise UserError(f"{name} has {schema.names.count(column)} columns named {column!r}; rename all but one")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"{name}: column {column!r} holds {kind}, not text; give a text column with --text-column")


def pieces(
    path: Path,
    column: str,
    place: int = 0,
    name: str | None = None,
    wait: Callable[[int, int], None] = lambda start, stop: None,
) -> Iterator[tuple[Piece, float]]:
    """Read the column from row ``place``. Work is counted in bytes of the file.

    Args:
        path: the file.
        column: of strings.
        place: a row number.
        name: what people call the file; ``path`` without it.
        wait: called with a range of bytes before they are read, for a file that is still on its way.

    Raises:
        UserError: the file cannot be read.
    """
    name = name or str(path)
    try:
        metadata = pq.read_metadata(path)
        if metadata.num_rows == 0:
            return
        stat = path.stat()
        work_per_row = stat.st_size / metadata.num_rows
        leaf = _leaf(metadata, name, column)
        for span in _spans_from(metadata, leaf, place):
            for group in span.groups:
                wait(*_byte_range(metadata.row_group(group).column(leaf)))
            if span.size > GROUP_BYTES:
                for texts in _stream(path, column, name, span):
                    yield texts, texts.count * work_per_row
            else:
                yield ParquetRows(path, stat.st_mtime_ns, column, name, span), span.rows * work_per_row
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(name, error) from error


def first_byte(path: Path, column: str, place: int, name: str) -> int:
    """Where in the file reading from row ``place`` begins. Raises ``UserError`` when the footer cannot be read."""
    try:
        metadata = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(name, error) from error
    leaf = _leaf(metadata, name, column)
    span = next(_spans_from(metadata, leaf, place), None)
    if span is None:
        return path.stat().st_size
    return _byte_range(metadata.row_group(span.groups[0]).column(leaf))[0]


def _leaf(metadata: pq.FileMetaData, name: str, column: str) -> int:
    """The number of the column among those of the file, in which the parts of nested columns count, too."""
    check_schema(name, metadata.schema.to_arrow_schema(), column)
    paths = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    return paths.index(column)


def _spans_from(metadata: pq.FileMetaData, leaf: int, place: int) -> Iterator[Span]:
    """The file's rows from row ``place`` on, divided as ``_spans`` divides them all."""
    for span in _spans(metadata, leaf):
        if span.row + span.rows > place:
            yield _behind(metadata, span, place)


def _spans(metadata: pq.FileMetaData, leaf: int) -> Iterator[Span]:
    """Divide the file's rows: small row groups together, large ones in slices, those that are too large whole."""
    row, waiting = 0, Span(0, 0, (), 0, 0)
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        size = metadata.row_group(group).column(leaf).total_uncompressed_size
        if size >= PIECE_BYTES and waiting.rows:
            yield waiting
            waiting = Span(row, 0, (), 0, 0)
        if size > GROUP_BYTES:
            yield Span(row, rows, (group,), 0, size)
        elif size >= PIECE_BYTES:
            slices = min(rows, round(size / PIECE_BYTES))
            cuts = [rows * number // slices for number in range(slices + 1)]
            for begin, end in pairwise(cuts):
                yield Span(row + begin, end - begin, (group,), begin, size // slices)
        else:
            waiting = Span(waiting.row, waiting.rows + rows, (*waiting.groups, group), 0, waiting.size + size)
            if waiting.size >= PIECE_BYTES:
                yield waiting
                waiting = Span(row + rows, 0, (), 0, 0)
        row += rows
        if not waiting.rows:
            waiting = Span(row, 0, (), 0, 0)
    if waiting.rows:
        yield waiting


def _behind(metadata: pq.FileMetaData, span: Span, place: int) -> Span:
    """The rows of ``span`` from row ``place`` on, which lies before its end."""
    done = max(0, place - span.row)
    skip, groups = span.skip + done, list(span.groups)
    while skip >= metadata.row_group(groups[0]).num_rows:
        skip -= metadata.row_group(groups.pop(0)).num_rows
    return Span(span.row + done, span.rows - done, tuple(groups), skip, span.size)


def _stream(path: Path, column: str, name: str, span: Span) -> Iterator[ArrowTexts]:
    """Decode a large row group batch by batch, without holding it in memory."""
    row = span.row - span.skip
    with pq.ParquetFile(path, buffer_size=PIECE_BYTES, pre_buffer=False) as file:
        of_group = file.metadata.row_group(span.groups[0]).num_rows
        rows = max(1, min(PIECE_BYTES * of_group // span.size, 1 << 16))
        for batch in file.iter_batches(rows, row_groups=list(span.groups), columns=[column], use_threads=False):
            done = min(max(0, span.row - row), batch.num_rows)
            if done < batch.num_rows:
                # A slice that is pickled as it is takes the whole buffers it views along.
                texts = batch.column(0).slice(done)
                yield ArrowTexts(name, row + done, len(texts), _copied(texts))
            row += batch.num_rows


def _copied(texts: pa.Array) -> bytes:
    # A view's buffers are written whole; those of the other types only as far as they are used.
    texts = texts.cast(pa.large_string()) if pa.types.is_string_view(texts.type) else texts
    batch = pa.record_batch([texts], names=["text"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


@lru_cache(maxsize=1)
def _read_groups(path: Path, stamp: int, column: str, name: str, groups: tuple[int, ...]) -> pa.ChunkedArray:
    """Read row groups [rows]. Neighbouring pieces of one row group often come to the same process."""
    try:
        return _open(path, stamp).read_row_groups(list(groups), columns=[column], use_threads=False).column(0)
    except (OSError, pa.ArrowException) as error:
        raise _unreadable(name, error) from error


@lru_cache(maxsize=2)
def _open(path: Path, stamp: int) -> pq.ParquetFile:
    """Open a file and keep it open: its footer can be a megabyte."""
    return pq.ParquetFile(path, pre_buffer=False)


def _decode(column: pa.Array | pa.ChunkedArray) -> Sequence[str | BadRow]:
    try:
        return [text or "" for text in column.to_pylist()]
    except UnicodeDecodeError:
        # One text spoils the conversion of all: take them one by one.
        wide = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
        return [_text(utf8 or b"") for utf8 in column.cast(wide).to_pylist()]


def _text(utf8: bytes) -> str | BadRow:
    try:
        return utf8.decode()
    except UnicodeDecodeError as error:
        return BadRow(f"not valid UTF-8 ({error.reason})")


def _where(name: str, row: int) -> str:
    return f"{name}, row {row} (counted from 0)"


def _byte_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    first = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        first = min(first, chunk.dictionary_page_offset)
    return first, first + chunk.total_compressed_size


def _unreadable(name: str, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UserError(
        f"{name} cannot be read ({reason}); download it again and run the same command again to continue, "
        "or leave it out"
    )
