"""How many UTF-8 bytes of text each vocabulary id stands for, so that a loss can be given in bits per byte."""

import json
import re
from collections.abc import Callable, Iterator

import numpy as np
from tokenizers import Tokenizer

from torchtitan_ext.errors import UserError

BYTE_FALLBACK = re.compile(r"<0x[0-9A-F]{2}>")


def token_bytes(tokenizer: Tokenizer, eot_id: int) -> np.ndarray:
    """Return the table [vocab_size] uint32.

    Exact for byte-level vocabularies (GPT-2, Llama 3, Qwen: each symbol is one byte) and for plain characters. For
    SentencePiece vocabularies ("▁" is a space) it is exact but for the space that the tokeniser puts before a document.
    Special tokens, end-of-text among them, stand for no text.

    Raises:
        UserError: the tokeniser is of another kind, whose tokens do not add up to the text.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = np.zeros(max(vocabulary.values()) + 1, dtype=np.uint32)
    length = _length_rule(json.loads(tokenizer.to_str()))
    for token, index in vocabulary.items():
        table[index] = length(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        table[index] = 0 if added.special else len(added.content.encode())
    table[eot_id] = 0
    return table


def _length_rule(description: dict) -> Callable[[str], int]:
    """Choose how to count a token's bytes from the parts that the tokeniser is made of."""
    model = description["model"]["type"]
    kinds = set(_types(description["pre_tokenizer"])) | set(_types(description["decoder"]))
    marks = json.dumps([description["pre_tokenizer"], description["decoder"]], ensure_ascii=False)
    if "ByteLevel" in kinds:
        return len
    if "▁" in marks:
        return _sentencepiece_length
    if model == "BPE" and description["pre_tokenizer"] is None and kinds <= {"Fuse"}:
        return lambda token: len(token.encode())
    raise UserError(
        f"cannot tell how many bytes of text the tokens of this {model} tokeniser stand for; use one with a "
        "byte-level, SentencePiece or plain character vocabulary, for example gpt2"
    )


def _sentencepiece_length(token: str) -> int:
    if BYTE_FALLBACK.fullmatch(token):
        return 1
    return len(token.replace("▁", " ").encode())


def _types(part: object) -> Iterator[str]:
    """List every ``type`` in a tokeniser's part, which may be a sequence of parts."""
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        for value in part.values():
            yield from _types(value)
    elif isinstance(part, list):
        for value in part:
            yield from _types(value)
