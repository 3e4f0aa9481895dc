"""A data set of random tokens, for measuring where no prepared text is at hand: dense models cost the same on any."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save

from data_prep.files import sha256
from data_prep.manifest import MANIFEST, TOKEN_BYTES, TOKENIZER, Manifest, Settings, Split, SplitName, TokenizerFile
from data_prep.shards import ShardWriter
from data_prep.vocabulary import TENSOR
from torchtitan_ext.files import write_file


def write_random_tokens(folder: Path, vocab_size: int, tokens: int) -> None:
    """Write a data set folder with ``tokens`` tokens in each split, uniform over ``vocab_size`` ids; 0 ends a document.

    Its tokeniser is an empty file: there is no text to go with the tokens.
    """
    generator = np.random.default_rng(0)
    dtype = np.dtype("uint16" if vocab_size <= 1 << 16 else "uint32")
    write_file(folder / TOKENIZER, b"")
    write_file(folder / TOKEN_BYTES, save({TENSOR: np.ones(vocab_size, dtype=np.uint32)}))
    splits: dict[SplitName, Split] = {}
    for name in ("train", "heldout"):
        writer = ShardWriter(folder, name, dtype, 0)
        writer.add(generator.integers(vocab_size, size=tokens, dtype=dtype))
        shard = writer.flush()
        assert shard is not None
        splits[name] = Split(tokens=tokens, documents=1, bytes=tokens, token_bytes=tokens, shards=(shard,))
    manifest = Manifest(
        settings=Settings(
            source={"kind": "random"}, tokenizer="none", eot_token=None, heldout_fraction=0.5, shard_tokens=tokens
        ),
        tokenizer=TokenizerFile(kind="none", sha256=sha256(folder / TOKENIZER)),
        token_bytes_sha256=sha256(folder / TOKEN_BYTES),
        vocab_size=vocab_size,
        eot_id=0,
        dtype="uint16" if dtype == np.uint16 else "uint32",
        splits=splits,
    )
    write_file(folder / MANIFEST, manifest.to_json().encode())
