"""Documents streamed from a data set on the Hugging Face Hub."""

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import fsspec  # type: ignore[import-untyped]
import pyarrow.parquet as pq

from data_prep.sources.base import Piece
from data_prep.sources.parquet import ArrowTexts
from torchtitan_ext.errors import UserError, nearest

if TYPE_CHECKING:
    from datasets import DatasetBuilder, IterableDataset

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
"""Educational web text, https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu."""

SPLIT = "train"
ROWS_PER_PIECE = 256


class HubSource:
    """One configuration of a Parquet data set, streamed with ``datasets``; every file is a part.

    Nothing is kept on disk. ``repository`` may also be a local folder in the layout of the Hub.

    Raises:
        UserError: no connection, no such data set, configuration, revision or column.
    """

    def __init__(self, repository: str, config: str, revision: str | None, column: str) -> None:
        self._repository, self._config, self._revision, self._column = repository, config, revision, column
        builder = self._builder(columns=[column])
        self._stream = self._open(builder)
        if column not in (self._stream.features or {}):
            known = self._open(self._builder()).features or {}
            hint = nearest(column, known)
            raise UserError(f"{repository} has no column {column!r}; {hint} Give it with --text-column")
        self._files = [str(name) for name in builder.config.data_files[SPLIT]]

    def _builder(self, **options: list[str]) -> "DatasetBuilder":
        # Importing it takes a second, which local sources need not pay.
        from datasets import load_dataset_builder

        try:
            return load_dataset_builder(self._repository, self._config, revision=self._revision, **options)
        except ValueError as error:
            raise UserError(f"{self._repository}, --config {self._config}: {_one_line(error)}") from error
        except Exception as error:  # Connections fail in the classes of several libraries.
            raise self._unreachable(error) from error

    def _open(self, builder: "DatasetBuilder") -> "IterableDataset":
        try:
            return builder.as_streaming_dataset(split=SPLIT)
        except Exception as error:  # As above.
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> UserError:
        return UserError(
            f"cannot open {self._repository} on the Hugging Face Hub ({_one_line(error)}); check the network and "
            "--revision, or give local files or 'builtin' as the source"
        )

    @property
    def parts(self) -> int:
        return self._stream.num_shards

    @property
    def work(self) -> float:
        return self.parts

    @property
    def most_workers(self) -> int:
        return 1 << 16

    def describe(self) -> dict[str, str | int | None]:
        revision = re.search(r"@([0-9a-f]{40})/", self._files[0])
        names = [re.sub(r"^.*@[0-9a-f]{40}/", "", name) for name in self._files]
        return {
            "kind": "hub",
            "repository": self._repository,
            "config": self._config,
            "revision": revision[1] if revision else None,
            "files": len(names),
            "listing_sha256": hashlib.sha256("\n".join(names).encode()).hexdigest(),
            "text_column": self._column,
        }

    def pieces(self, part: int) -> Iterator[tuple[Piece, float]]:
        """Read one file. Work is counted in files, taken to be of like size."""
        name = self._files[part]
        row = 0
        try:
            with fsspec.open(name, "rb") as file:
                rows = pq.read_metadata(file).num_rows
            stream = self._stream.shard(num_shards=self.parts, index=part).with_format("arrow")
            for table in stream.iter(batch_size=ROWS_PER_PIECE):
                yield ArrowTexts(f"{name}, rows {row} to {row + len(table)}", table[self._column]), len(table) / rows
                row += len(table)
        except Exception as error:  # As above.
            raise UserError(
                f"reading {name} failed after {row} rows ({_one_line(error)}); "
                "run the same command again to continue where it stopped"
            ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
