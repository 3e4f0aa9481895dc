"""Blocks of documents → tokens on either side of the held-out cut. This is what the worker processes run."""

import hashlib
import os
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from data_prep.manifest import SPLITS, SplitName
from data_prep.sources import Block, Cursor, Piece
from torchtitan_ext.errors import UserError


def is_heldout(utf8: bytes, fraction: float) -> bool:
    """Tell on which side of the cut a document lies, from its text alone: a fixed hash, seen as a number in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(utf8, digest_size=8).digest()) < fraction * 2**64


def utf8_documents(piece: Piece) -> list[tuple[str, bytes]]:
    """Return the piece's documents, as text and in UTF-8, without the empty ones.

    Raises:
        UserError: a document holds half of a surrogate pair, which no encoding can write.
    """
    try:
        return [(text, text.encode()) for text in piece.texts() if text]
    except UnicodeEncodeError as error:
        message = f"{piece.where}: a document is not valid Unicode ({error.reason}); repair or remove it"
        raise UserError(message) from error


@dataclass(frozen=True)
class EncodedSplit:
    """One split's share of a block: tokens [N], documents, bytes of text, and bytes of text by the token table."""

    tokens: np.ndarray
    documents: int
    bytes: int
    token_bytes: int


@dataclass(frozen=True)
class EncodedBlock:
    """A block's tokens for each split, the work it stood for and where it ended."""

    splits: dict[SplitName, EncodedSplit]
    work: float
    end: Cursor


class Encoder:
    """Turns blocks into tokens, with the end-of-text token behind each document.

    Args:
        tokenizer: path of the ``tokenizer.json``.
        table: bytes of text for each vocabulary id [vocab_size].
        eot_id: the end-of-text token.
        dtype: of the tokens.
        heldout_fraction: how much of the hash range goes to the held-out split.
    """

    def __init__(
        self, tokenizer: Path, table: np.ndarray, eot_id: int, dtype: np.dtype, heldout_fraction: float
    ) -> None:
        # Each process works on one core; the library's own threads would fight over them.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        # "<|endoftext|>" written out in a document is text, not the end of it.
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._table = table
        self._eot_id = eot_id
        self._dtype = dtype
        self._heldout_fraction = heldout_fraction

    def __call__(self, block: Block) -> EncodedBlock:
        sides: dict[SplitName, list[tuple[str, bytes]]] = {name: [] for name in SPLITS}
        for piece in block.pieces:
            for document in utf8_documents(piece):
                sides["heldout" if is_heldout(document[1], self._heldout_fraction) else "train"].append(document)
        return EncodedBlock({name: self._encode(side) for name, side in sides.items()}, block.work, block.end)

    def _encode(self, documents: list[tuple[str, bytes]]) -> EncodedSplit:
        ids = array("H" if self._dtype == np.uint16 else "I")
        for encoding in self._tokenizer.encode_batch_fast([text for text, _ in documents], add_special_tokens=False):
            ids.fromlist(encoding.ids)
            ids.append(self._eot_id)
        tokens = np.array(ids, dtype=self._dtype)
        length = sum(len(utf8) for _, utf8 in documents)
        return EncodedSplit(tokens, len(documents), length, int(self._table[tokens].sum(dtype=np.int64)))
