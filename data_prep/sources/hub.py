"""Documents from a Parquet data set on the Hugging Face Hub, or from a local copy of its repository."""

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources import card, parquet
from data_prep.sources.base import PIECE_BYTES, PartFile, Piece
from data_prep.sources.choice import files_below
from data_prep.sources.download import CONNECTIONS, Downloads
from data_prep.sources.hub_client import HubClient
from data_prep.sources.patience import one_line
from torchtitan_ext.errors import UserError

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
"""Educational web text, https://huggingface.co/datasets/HuggingFaceFW/fineweb-edu."""


class _Place(Protocol):
    """Where a repository's files are. ``commit`` is None for a folder."""

    @property
    def commit(self) -> str | None: ...

    def names(self) -> list[str]: ...

    def card(self) -> str: ...

    def schema(self, name: str) -> pa.Schema: ...

    def part_file(self, name: str) -> PartFile: ...


class HubSource:
    """One configuration of a Parquet data set; every file is a part.

    Files are downloaded by several connections a bounded stretch ahead of what is read, and deleted behind it.
    ``repository`` may also be a local folder in the layout of the Hub, and such a folder in the working directory comes
    before a repository of that name.

    Args:
        repository: its name, or a folder.
        config: the configuration.
        revision: a commit, branch or tag; the newest without it.
        column: of the text.
        spool: where downloads are put; without it a folder among the system's temporary files.

    Raises:
        UserError: no connection, no such data set, configuration, revision or column.
    """

    def __init__(
        self, repository: str, config: str, revision: str | None, column: str, spool: Path | None = None
    ) -> None:
        self._repository, self._config, self._column = repository, config, column
        self._spool = spool
        self._downloads: Downloads | None = None
        self._folder = Path(repository) if Path(repository).is_dir() else None
        self.notes: list[str] = []
        if self._folder is not None:
            if revision is not None:
                raise UserError(f"{repository} is a local folder, which has no revisions; leave --revision out")
            self.notes.append(
                f"the documents are read from the local folder {self._folder.resolve()}, not from the Hub"
            )
            self._place: _Place = _LocalFolder(self._folder)
        else:
            self._place = _Remote(repository, revision)
        names = self._place.names()
        layout = (card.layout_of(self._place.card()) if card.CARD in names else {}) or card.FINEWEB_LAYOUT
        _, self._names = card.choose(repository, layout, config, names)
        for name in self._names:
            if not name.endswith(".parquet"):
                raise UserError(
                    f"{repository}, --config {config}: {name} is no Parquet file; give paths of local files"
                )
        self._files = self.files()
        parquet.check_schema(f"{repository}/{self._names[0]}", self._place.schema(self._names[0]), column)

    @property
    def parts(self) -> int:
        return len(self._names)

    @property
    def work(self) -> float:
        return sum(file.size for file in self._files)

    @property
    def most_workers(self) -> int:
        return max(1, sum(file.size for file in self._files) // PIECE_BYTES)

    def describe(self) -> dict[str, str | int | None]:
        return {
            "kind": "hub",
            "repository": self._repository,
            "config": self._config,
            "revision": self._place.commit,
            "files": len(self._names),
            "listing_sha256": hashlib.sha256("\n".join(self._names).encode()).hexdigest(),
            "text_column": self._column,
        }

    def files(self) -> list[PartFile]:
        return [self._place.part_file(name) for name in self._names]

    def pieces(self, part: int, place: int = 0) -> Iterator[tuple[Piece, float]]:
        name = f"{self._repository}/{self._names[part]}"
        if self._folder is not None:
            return parquet.pieces(self._folder / self._names[part], self._column, place, name)
        return self._downloaded(part, place, name)

    def release(self, part: int) -> None:
        if self._downloads is not None:
            self._downloads.release(part)

    def close(self) -> None:
        if self._downloads is not None:
            self._downloads.close()
            self._downloads = None

    def _downloaded(self, part: int, place: int, name: str) -> Iterator[tuple[Piece, float]]:
        downloads = self._downloads
        if downloads is None or downloads.next != part or place:
            self.close()
            folder = self._spool or Path(tempfile.gettempdir()) / f"depth-prep-{id(self)}"
            client = HubClient(self._repository, CONNECTIONS)
            downloads = self._downloads = Downloads(client, str(self._place.commit), self._files, part, folder)
        downloads.fetch_footer(part)
        path = downloads.path(part)
        downloads.begin(part, parquet.first_byte(path, self._column, place, name))

        def wait(start: int, stop: int) -> None:
            downloads.wait(part, start, stop)

        yield from parquet.pieces(path, self._column, place, name, wait)


class _LocalFolder:
    commit = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        return [path.relative_to(self._folder).as_posix() for path in files_below(self._folder)]

    def card(self) -> str:
        return (self._folder / card.CARD).read_text(errors="replace")

    def schema(self, name: str) -> pa.Schema:
        return parquet.read_schema(self._folder / name)

    def part_file(self, name: str) -> PartFile:
        return PartFile.of(self._folder / name, name)


class _Remote:
    def __init__(self, repository: str, revision: str | None) -> None:
        self._client = HubClient(repository, 1)
        self.commit: str = self._client.commit(revision)
        self._files = {file.name: file for file in self._client.files(self.commit)}

    def names(self) -> list[str]:
        return list(self._files)

    def card(self) -> str:
        return self._client.text(self.commit, card.CARD)

    def schema(self, name: str) -> pa.Schema:
        try:
            # Parquet is read from its end: the footer alone will do.
            return pq.read_schema(pa.BufferReader(self._client.footer(self.commit, self._files[name])))
        except pa.ArrowException as error:
            raise UserError(f"{self._client.repository}/{name} is no Parquet file ({one_line(error)})") from error

    def part_file(self, name: str) -> PartFile:
        return self._files[name]
