"""Reading a data set folder."""

from bisect import bisect_right
from collections import OrderedDict
from itertools import accumulate, islice
from pathlib import Path
from typing import Self

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from data_prep.files import sha256
from data_prep.journal import JOURNAL
from data_prep.manifest import (
    MANIFEST,
    SPLITS,
    TOKEN_BYTES,
    TOKENIZER,
    Manifest,
    Settings,
    Shard,
    Split,
    SplitName,
    TokenizerFile,
    read_manifest,
)
from data_prep.shards import map_shard
from data_prep.vocabulary import TENSOR
from torchtitan_ext.errors import UserError

OPEN_SHARDS = 16_384
"""How many shards of a split stay mapped, a quarter of what Linux allows a process. None of them keeps a file open."""

AGAIN = "prepare the data set again with `depth prep`"


class TokenDataset:
    """A finished data set folder. Tokens are read from disk when asked for.

    Attributes:
        path: the folder.
        manifest: what is in it.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the folder after checking that every file is there in its recorded size.

        Raises:
            UserError: naming the file, when something is missing, unfinished, changed or of another format version.
        """
        folder = Path(path)
        if not (folder / MANIFEST).is_file():
            raise UserError(_why_no_manifest(folder))
        manifest = read_manifest(folder / MANIFEST)
        for shard in _shards(manifest):
            _check_size(folder / shard.file, shard.size)
        check_digest(folder / TOKENIZER, manifest.tokenizer.sha256)
        check_digest(folder / TOKEN_BYTES, manifest.token_bytes_sha256)
        return cls(folder, manifest)

    @classmethod
    def unprepared(cls, path: str | Path, vocab_size: int) -> Self:
        """Stand for a data set that is not there yet: a vocabulary without tokens or files."""
        settings = Settings(source={}, tokenizer="", heldout_fraction=0.0, shard_tokens=0)
        manifest = Manifest(
            settings=settings,
            tokenizer=TokenizerFile(kind="", sha256=""),
            token_bytes_sha256="",
            vocab_size=vocab_size,
            eot_id=0,
            dtype="uint32",
            splits={split: Split() for split in SPLITS},
        )
        return cls(Path(path), manifest)

    @property
    def vocab_size(self) -> int:
        return self.manifest.vocab_size

    @property
    def eot_id(self) -> int:
        """The token behind each document."""
        return self.manifest.eot_id

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens in equal order with an equal tokeniser; 16 hexadecimal digits."""
        return self.manifest.fingerprint

    @property
    def heldout_fingerprint(self) -> str:
        """The same for the held-out split alone."""
        return self.manifest.heldout_fingerprint

    def split(self, name: SplitName) -> "TokenSplit":
        """Return the tokens of ``train`` or ``heldout``."""
        return TokenSplit(self.path, name, self.manifest)

    def token_bytes(self) -> np.ndarray:
        """Return how many UTF-8 bytes of text each vocabulary id stands for [vocab_size] uint32; end-of-text: 0."""
        return load_file(self.path / TOKEN_BYTES)[TENSOR]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.path / TOKENIZER))

    def shards(self) -> list[Shard]:
        """The files of tokens, of both splits."""
        return _shards(self.manifest)

    def verify_checksums(self, part: int = 0, parts: int = 1) -> None:
        """Compare the SHA-256 of shards ``part``, ``part + parts``, ... with the manifest: ranks can share the work.

        Raises:
            UserError: naming the first shard that differs.
        """
        for shard in islice(_shards(self.manifest), part, None, parts):
            check_digest(self.path / shard.file, shard.sha256)


class TokenSplit:
    """The tokens of one split, one document behind the other, as if they lay in one array.

    Attributes:
        path: the data set folder.
        name: ``train`` or ``heldout``.
        n_tokens: how many there are.
    """

    def __init__(self, path: Path, name: SplitName, manifest: Manifest) -> None:
        self.path = path
        self.name = name
        self._vocab_size = manifest.vocab_size
        self._dtype = np.dtype(manifest.dtype)
        self._shards = manifest.splits[name].shards
        self._ends = list(accumulate(shard.tokens for shard in self._shards))
        self._mapped: OrderedDict[int, np.ndarray] = OrderedDict()
        self.n_tokens = self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of tokens ``start`` to ``stop`` [stop - start], uint16 or uint32.

        Raises:
            UserError: naming the shard that is damaged or holds a token outside the vocabulary.
            IndexError: the range does not lie within the split.
        """
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start} to {stop} of the {self.n_tokens} of split {self.name}")
        tokens = np.empty(stop - start, dtype=self._dtype)
        number = bisect_right(self._ends, start)
        at = start
        while at < stop:
            shard_start = self._ends[number] - self._shards[number].tokens
            end = min(stop, self._ends[number])
            part = tokens[at - start : end - start]
            part[:] = self._map(number)[at - shard_start : end - shard_start]
            self._check_vocabulary(part, number, at - shard_start)
            at = end
            number += 1
        return tokens

    def _map(self, number: int) -> np.ndarray:
        mapped = self._mapped.get(number)
        if mapped is None:
            if len(self._mapped) == OPEN_SHARDS:
                self._mapped.popitem(last=False)
            shard = self._shards[number]
            mapped = self._mapped[number] = map_shard(self.path / shard.file, shard.tokens, self._dtype)
        else:
            self._mapped.move_to_end(number)
        return mapped

    def _check_vocabulary(self, tokens: np.ndarray, number: int, first: int) -> None:
        largest = int(tokens.max())
        if largest >= self._vocab_size:
            place = first + int(tokens.argmax())
            raise UserError(
                f"{self.path / self._shards[number].file}: token {place} is {largest}, outside the vocabulary of "
                f"{self._vocab_size}; the file is damaged, {AGAIN}"
            )


def _shards(manifest: Manifest) -> list[Shard]:
    return [shard for name in SPLITS for shard in manifest.splits[name].shards]


def _why_no_manifest(folder: Path) -> str:
    if (folder / JOURNAL).exists():
        return f"{folder} is unfinished ({MANIFEST} is missing); run the same `depth prep` again to complete it"
    if not folder.exists():
        return f"{folder} does not exist; make it with `depth prep`, or correct the path"
    return f"{folder / MANIFEST} is missing, so {folder} is no data set folder; make one with `depth prep`"


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise UserError(f"{path} is missing; {AGAIN}")
    if path.stat().st_size != size:
        raise UserError(f"{path} has {path.stat().st_size} bytes instead of {size}; the file is damaged, {AGAIN}")


def check_digest(path: Path, digest: str) -> None:
    """Raise ``UserError`` naming ``path`` unless it is there with the SHA-256 ``digest``."""
    if not path.is_file():
        raise UserError(f"{path} is missing; {AGAIN}")
    if sha256(path) != digest:
        raise UserError(f"{path} is not the file that was written (its SHA-256 differs); {AGAIN}")
