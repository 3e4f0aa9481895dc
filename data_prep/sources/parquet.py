"""Documents from one string column of a Parquet file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.base import PIECE_BYTES
from torchtitan_ext.errors import UserError, nearest


@dataclass(frozen=True)
class ArrowTexts:
    """A piece held as an Arrow string column; a null counts as an empty document."""

    where: str
    column: pa.Array | pa.ChunkedArray

    @property
    def size(self) -> int:
        return self.column.nbytes

    def texts(self) -> list[str]:
        try:
            return [text or "" for text in self.column.to_pylist()]
        except UnicodeDecodeError as error:
            raise UserError(f"{self.where}: a document is not valid UTF-8 ({error.reason}); repair the file") from error


def check(path: Path, column: str) -> None:
    """Raise ``UserError`` unless ``path`` is a Parquet file with a string column named ``column``."""
    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a readable Parquet file; download it again or leave it out") from error
    if column not in schema.names:
        raise UserError(f"{path} has no column {column!r}; {nearest(column, schema.names)} Give it with --text-column")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
        raise UserError(f"{path}: column {column!r} holds {kind}, not text; give a text column with --text-column")


def pieces(path: Path, column: str) -> Iterator[tuple[ArrowTexts, float]]:
    """Read the column batch by batch, without holding a row group in memory. Work is counted in bytes of the file."""
    try:
        with pq.ParquetFile(path, buffer_size=PIECE_BYTES, pre_buffer=False) as file:
            rows = file.metadata.num_rows
            if rows == 0:
                return
            work_per_row = path.stat().st_size / rows
            row = 0
            for batch in file.iter_batches(_rows_per_piece(file, column), columns=[column], use_threads=False):
                texts = ArrowTexts(f"{path}, rows {row} to {row + batch.num_rows}", batch.column(0))
                row += batch.num_rows
                yield texts, batch.num_rows * work_per_row
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read ({_one_line(error)}); download it again or leave it out") from error


def _rows_per_piece(file: pq.ParquetFile, column: str) -> int:
    metadata = file.metadata
    leaf = file.schema.names.index(column)
    size = sum(
        metadata.row_group(group).column(leaf).total_uncompressed_size for group in range(metadata.num_row_groups)
    )
    return max(1, min(PIECE_BYTES * metadata.num_rows // max(size, 1), 1 << 16))


def _one_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
