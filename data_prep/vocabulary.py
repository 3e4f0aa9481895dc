"""The tokeniser's files in a data set folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors.numpy import load_file, save
from tokenizers import Tokenizer

from data_prep.manifest import TOKEN_BYTES, TOKENIZER
from data_prep.token_bytes import token_bytes
from data_prep.tokenizer import end_of_text, usual_ends, with_special
from torchtitan_ext.files import write_file

TENSOR = "token_bytes"


@dataclass(frozen=True)
class Vocabulary:
    """What the shards need to know of a tokeniser: bytes of text for each id [vocab_size], and the end-of-text id."""

    token_bytes: np.ndarray
    eot_id: int

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    @property
    def dtype(self) -> Literal["uint16", "uint32"]:
        """The smallest type on disk that holds every id."""
        return "uint16" if self.size <= 1 << 16 else "uint32"


def write_vocabulary(tokenizer: Tokenizer, eot_token: str | None, folder: Path) -> str:
    """Write ``tokenizer.json``, with the end-of-text token as a special one, and ``token_bytes.safetensors``.

    Returns:
        A line for the user: which token ends documents.

    Raises:
        UserError: no end-of-text token, or a kind of tokeniser whose tokens do not add up to the text.
    """
    eot_id = end_of_text(tokenizer, eot_token)
    added = tokenizer.get_added_tokens_decoder().get(eot_id)
    others = [tokenizer.id_to_token(index) for index in usual_ends(tokenizer) if index != eot_id]
    line = f"end-of-text token: {tokenizer.id_to_token(eot_id)!r} (id {eot_id})"
    if added is None or not added.special:
        line += ", made a special token: where a text has these characters, they are text"
    if others and eot_token is None:
        line += f"; the tokeniser also has {', '.join(map(repr, others))}, to be chosen with --eot-token"
    tokenizer = with_special(tokenizer, eot_id)
    table = token_bytes(tokenizer, eot_id)
    write_file(folder / TOKEN_BYTES, save({TENSOR: table}))
    write_file(folder / TOKENIZER, tokenizer.to_str(pretty=True).encode())
    return line


def read_vocabulary(folder: Path, eot_token: str | None) -> Vocabulary:
    """Read what ``write_vocabulary`` wrote."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    return Vocabulary(load_file(folder / TOKEN_BYTES)[TENSOR], end_of_text(tokenizer, eot_token))
