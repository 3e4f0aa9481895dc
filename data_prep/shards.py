"""Token shards: safetensors files with one 1-D tensor "tokens"."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from safetensors.numpy import save

from data_prep.manifest import Shard
from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file

TENSOR = "tokens"
DTYPES = {"uint16": "U16", "uint32": "U32"}
HEADER_LIMIT = 1 << 20


class ShardWriter:
    """Collects the tokens of one split and writes them as numbered shards.

    Args:
        folder: the data set folder.
        split: the split, which is also the name of its sub-folder.
        dtype: of the tokens on disk.
        number: the number of the next shard.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, number: int) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._number = number
        self._waiting: list[np.ndarray] = []
        self.tokens = 0
        (folder / split).mkdir(exist_ok=True)

    def add(self, tokens: np.ndarray) -> None:
        """Keep tokens [N] for the next shard; ``self.tokens`` counts them."""
        if len(tokens):
            self._waiting.append(tokens)
            self.tokens += len(tokens)

    def flush(self) -> Shard | None:
        """Write what was collected as one shard, or nothing when there is nothing."""
        if not self._waiting:
            return None
        name = f"{self._split}/{self._number:05d}.safetensors"
        tokens = np.concatenate(self._waiting, dtype=self._dtype)
        self._waiting = []
        data = save({TENSOR: tokens})
        write_file(self._folder / name, data)
        shard = Shard(file=name, tokens=self.tokens, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        self.tokens = 0
        self._number += 1
        return shard


def map_shard(path: Path, tokens: int, dtype: np.dtype) -> np.ndarray:
    """Memory-map the tokens of a shard, read-only [tokens].

    Raises:
        UserError: the file is not a shard of ``tokens`` tokens of type ``dtype``.
    """
    expected = {"dtype": DTYPES[dtype.name], "shape": [tokens], "data_offsets": [0, tokens * dtype.itemsize]}
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(min(length, HEADER_LIMIT)))[TENSOR]
        if entry != expected:
            raise ValueError(f"it holds {entry}, not {expected}")
        # The mapping outlives the file, so it takes no file descriptor: thousands of shards can stay mapped.
        with pa.memory_map(str(path)) as file:
            data = file.read_buffer()
        return np.frombuffer(data, dtype.newbyteorder("<"), tokens, 8 + length)
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path} is not the token shard it should be ({error}); prepare the data set again with `depth prep`"
        ) from error
