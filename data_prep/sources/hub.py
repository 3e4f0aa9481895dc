"""Documents streamed from a data set on the Hugging Face Hub."""

import hashlib
import re
from collections.abc import Iterator

import pyarrow as pa

from data_prep.sources.base import Piece, Texts
from data_prep.sources.parquet import ArrowTexts
from torchtitan_ext.errors import UserError, nearest

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
        # Importing it takes a second, which local sources need not pay.
        import datasets

        self._repository, self._config, self._column = repository, config, column
        try:
            builder = datasets.load_dataset_builder(repository, config, revision=revision, columns=[column])
            self._stream = builder.as_streaming_dataset(split=SPLIT)
            features = self._stream.features or {}
            if column not in features:
                names = datasets.load_dataset_builder(repository, config, revision=revision)
                known = names.as_streaming_dataset(split=SPLIT).features or {}
                raise UserError(
                    f"{repository} has no column {column!r}; {nearest(column, known)} Give it with --text-column"
                )
        except OSError as error:
            raise UserError(
                f"cannot reach {repository} on the Hugging Face Hub ({_one_line(error)}); check the network and the name, "
                "or give local files or 'builtin' as the source"
            ) from error
        except ValueError as error:
            raise UserError(f"{repository}, --config {config}: {_one_line(error)}") from error
        self._files = [str(name) for name in builder.config.data_files[SPLIT]]

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
        """Read one file. How long a file is shows only at its end, so its work is counted there."""
        stream = self._stream.shard(num_shards=self.parts, index=part).with_format("arrow")
        row = 0
        try:
            for table in stream.iter(batch_size=ROWS_PER_PIECE):
                yield ArrowTexts(f"{self._files[part]}, rows {row} to {row + len(table)}", table[self._column]), 0.0
                row += len(table)
        except (OSError, pa.ArrowException) as error:
            raise UserError(
                f"reading {self._files[part]} failed after {row} rows ({_one_line(error)}); "
                "run the same command again to continue where it stopped"
            ) from error
        yield Texts(f"{self._files[part]}, end", []), 1.0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
