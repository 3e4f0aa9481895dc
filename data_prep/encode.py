"""Blocks of documents → tokens on either side of the held-out cut. This is what the worker processes run."""

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

from data_prep.digest import Digest
from data_prep.heldout import is_heldout
from data_prep.manifest import SPLITS, SplitName
from data_prep.quiet import quiet_failure
from data_prep.sources import BadRow, Block, Cursor, Piece, bad_row
from torchtitan_ext.errors import UserError

SKIPPED_SHOWN = 20
"""How many of the rows that are left out are named."""


@dataclass(frozen=True)
class Document:
    """A row of a piece with text in it."""

    text: str
    utf8: bytes
    piece: Piece
    index: int

    @property
    def where(self) -> str:
        return self.piece.where(self.index)


def rows_of(piece: Piece) -> Iterator[Document | BadRow]:
    """Read a piece's rows, the empty ones too."""
    for index, row in enumerate(piece.rows()):
        if isinstance(row, BadRow):
            yield row
            continue
        try:
            yield Document(row, row.encode(), piece, index)
        except UnicodeEncodeError as error:
            # Half of a surrogate pair, which no encoding can write.
            yield BadRow(f"not valid Unicode ({error.reason})")


def documents_of(piece: Piece, skip_bad_rows: bool) -> Iterator[Document]:
    """Read a piece's documents, without the empty ones.

    Raises:
        UserError: naming a row that cannot be used, unless such rows are to be skipped.
    """
    for index, row in enumerate(rows_of(piece)):
        if isinstance(row, Document):
            if row.text:
                yield row
        elif not skip_bad_rows:
            bad_row(piece.where(index), row)


def digest_of(row: Document | BadRow) -> bytes:
    """What a row adds to the digest of its file."""
    return row.utf8 if isinstance(row, Document) else b"a row that cannot be used"


@dataclass(frozen=True)
class EncodedSplit:
    """One split's share of a block: tokens [N], documents, bytes of text, and bytes of text by the token table."""

    tokens: np.ndarray
    documents: int
    bytes: int
    token_bytes: int


@dataclass(frozen=True)
class EncodedBlock:
    """What came of a block.

    Attributes:
        splits: its tokens.
        rows: the digests of its rows, piece by piece, with the part of each piece.
        empty: rows without text.
        skipped: how many rows were left out because they cannot be used.
        named: the first ``SKIPPED_SHOWN`` of them in this process, each with the reason; a line each.
        work: the work it stood for.
        end: where it ended.
    """

    splits: dict[SplitName, EncodedSplit]
    rows: list[tuple[int, Digest]]
    empty: int
    skipped: int
    named: list[str]
    work: float
    end: Cursor


@dataclass
class _Rows:
    """The rows of a block, sorted."""

    sides: dict[SplitName, list[Document]] = field(default_factory=lambda: {name: [] for name in SPLITS})
    digests: list[tuple[int, Digest]] = field(default_factory=list)
    empty: int = 0
    skipped: int = 0
    named: list[str] = field(default_factory=list)


class Encoder:
    """Turns blocks into tokens, with the end-of-text token behind each document.

    Args:
        tokenizer: path of the ``tokenizer.json``.
        table: bytes of text for each vocabulary id [vocab_size].
        eot_id: the end-of-text token.
        dtype: of the tokens.
        heldout_fraction: how much of the hash range goes to the held-out split.
        skip_bad_rows: leave rows out that cannot be used, instead of raising ``UserError``.
    """

    def __init__(
        self,
        tokenizer: Path,
        table: np.ndarray,
        eot_id: int,
        dtype: np.dtype,
        heldout_fraction: float,
        skip_bad_rows: bool = False,
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
        self._skip_bad_rows = skip_bad_rows
        self._left_to_name = SKIPPED_SHOWN

    def __call__(self, block: Block) -> EncodedBlock:
        rows = self._sort(block)
        splits = {name: self._encode(side, rows) for name, side in rows.sides.items()}
        return EncodedBlock(splits, rows.digests, rows.empty, rows.skipped, rows.named, block.work, block.end)

    def _sort(self, block: Block) -> _Rows:
        rows = _Rows()
        for part, piece in zip(block.parts, block.pieces, strict=True):
            digest = Digest()
            for index, row in enumerate(rows_of(piece)):
                digest = digest.row(digest_of(row))
                if isinstance(row, BadRow):
                    self._leave_out(piece, index, row, rows)
                elif not row.text:
                    rows.empty += 1
                else:
                    heldout = is_heldout(row.utf8, self._heldout_fraction)
                    rows.sides["heldout" if heldout else "train"].append(row)
            rows.digests.append((part, digest))
        return rows

    def _encode(self, documents: list[Document], rows: _Rows) -> EncodedSplit:
        ids = array("H" if self._dtype == np.uint16 else "I")
        encoded = self._encodings(documents, rows)
        for _, encoding in encoded:
            ids.fromlist(encoding.ids)
            ids.append(self._eot_id)
        tokens = np.array(ids, dtype=self._dtype)
        if np.count_nonzero(tokens == self._eot_id) != len(encoded):
            where = next(document.where for document, encoding in encoded if self._eot_id in encoding.ids)
            raise UserError(
                f"{where}: the tokeniser makes its end-of-text token {self._tokenizer.id_to_token(self._eot_id)!r} of "
                "text in this document, so that documents could not be told apart; name another with --eot-token"
            )
        length = sum(len(document.utf8) for document, _ in encoded)
        return EncodedSplit(tokens, len(encoded), length, int(self._table[tokens].sum(dtype=np.int64)))

    def _encodings(self, documents: list[Document], rows: _Rows) -> list[tuple[Document, Encoding]]:
        """Encode together; one by one when that fails, to find out which document it is."""
        try:
            with quiet_failure():
                encodings = self._tokenizer.encode_batch_fast(
                    [document.text for document in documents], add_special_tokens=False
                )
            return list(zip(documents, encodings, strict=True))
        except BaseException as error:
            _raise_unless_from_library(error)
        encoded = []
        for document in documents:
            try:
                with quiet_failure():
                    encoded.append((document, self._tokenizer.encode(document.text, add_special_tokens=False)))
            except BaseException as error:
                _raise_unless_from_library(error)
                reason = str(error).strip().split("\n")[0]
                bad = BadRow(f"the tokeniser fails on this document of {len(document.utf8):,} bytes ({reason})")
                self._leave_out(document.piece, document.index, bad, rows)
        return encoded

    def _leave_out(self, piece: Piece, index: int, row: BadRow, rows: _Rows) -> None:
        if not self._skip_bad_rows:
            bad_row(piece.where(index), row)
        rows.skipped += 1
        # To find the place of a row may take reading the file up to it. A process has its blocks in order, so that the
        # first rows of all are among the first ones of each process.
        if self._left_to_name:
            self._left_to_name -= 1
            rows.named.append(f"{piece.where(index)}: {row.reason}")


def _raise_unless_from_library(error: BaseException) -> None:
    """A failure inside the library comes as an Exception, or as a PanicException, which is none."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    if isinstance(error, MemoryError):
        raise error
