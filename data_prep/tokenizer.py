"""Tokenisers: fetched, read from a file, or made from the source itself."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.encode import documents_of
from data_prep.files import sha256
from data_prep.heldout import is_heldout
from data_prep.passes import one_pass
from data_prep.sources import Block, Source
from torchtitan_ext.errors import UserError, nearest

EOT_TOKEN = "<|endoftext|>"
EOT_TOKENS = (EOT_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
KINDS = ("gpt2", "characters", "bpe:VOCAB", "the path of a tokenizer.json")
SMALLEST_BPE = 257
"""Every byte and the end-of-text token."""

SAMPLE_BYTES = 16 << 20
SAMPLE_BYTES_PER_ENTRY = 1 << 10
SAMPLE_PARTS = 16


def identity(kind: str) -> str:
    """Return what tells ``kind`` from every other tokeniser: itself, or the contents of the file it names.

    Raises:
        UserError: it is not one of the tokenisers on offer.
    """
    if kind in ("gpt2", "characters"):
        return kind
    if kind.startswith("bpe:"):
        size = kind.removeprefix("bpe:")
        if not size.isdecimal() or int(size) < SMALLEST_BPE:
            raise UserError(
                f"--tokenizer {kind}: the vocabulary size must be a whole number of at least {SMALLEST_BPE} "
                "(every byte and the end-of-text token), for example bpe:4096"
            )
        return kind
    if not Path(kind).is_file():
        raise UserError(f"--tokenizer {kind}: no such file or tokeniser; {nearest(kind, KINDS)}")
    return f"file with SHA-256 {sha256(Path(kind))}"


def build(kind: str, source: Source, heldout_fraction: float, workers: int, skip_bad_rows: bool = False) -> Tokenizer:
    """Return the tokeniser that ``kind`` asks for.

    ``bpe:VOCAB`` is a byte-level BPE (Radford et al. 2019, section 2.2) trained on a bounded sample of the training
    split: the beginnings of parts spread evenly over the source, the same ones every time. ``characters`` reads the
    whole source once and numbers its characters by code point.

    Raises:
        UserError: it cannot be fetched, read or made.
    """
    if kind == "gpt2":
        return _fetch(kind)
    if kind == "characters":
        return _characters(source, workers, skip_bad_rows)
    if kind.startswith("bpe:"):
        return _train(int(kind.removeprefix("bpe:")), source, heldout_fraction, workers, skip_bad_rows)
    try:
        return Tokenizer.from_file(kind)
    except Exception as error:  # The library raises no narrower class.
        raise UserError(f"{kind} is not a tokenizer.json of the tokenizers library ({error})") from error


def end_of_text(tokenizer: Tokenizer, token: str | None) -> int:
    """Return the id of the end-of-text token: ``token``, or else the first usual name that the vocabulary has.

    A special token comes before one that is ordinary text to the tokeniser: Gemma, for example, ends documents with
    ``<eos>`` and has ``</s>`` as a piece of HTML.
    """
    if token is not None:
        index = tokenizer.token_to_id(token)
        if index is None:
            special = [added.content for added in tokenizer.get_added_tokens_decoder().values()]
            raise UserError(f"--eot-token {token}: the tokeniser has no such token; {nearest(token, special)}")
        return index
    there = usual_ends(tokenizer)
    if not there:
        raise UserError(
            f"the tokeniser has none of the usual end-of-text tokens ({', '.join(EOT_TOKENS)}); name its own with "
            "--eot-token"
        )
    return there[0]


def usual_ends(tokenizer: Tokenizer) -> list[int]:
    """The ids of the usual end-of-text tokens that there are, special ones first."""
    special = {index for index, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    there = [index for name in EOT_TOKENS if (index := tokenizer.token_to_id(name)) is not None]
    return sorted(there, key=lambda index: index not in special)


def with_special(tokenizer: Tokenizer, index: int) -> Tokenizer:
    """Return the tokeniser with token ``index`` as a special one, so that the same characters in a text are text."""
    added = tokenizer.get_added_tokens_decoder().get(index)
    if added is not None and added.special:
        return tokenizer
    if added is None:
        tokenizer.add_special_tokens([tokenizer.id_to_token(index)])
        return tokenizer
    description = json.loads(tokenizer.to_str())
    for entry in description["added_tokens"]:
        entry["special"] = entry["special"] or entry["id"] == index
    return Tokenizer.from_str(json.dumps(description, ensure_ascii=False))


def _fetch(name: str) -> Tokenizer:
    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:  # Connection, cache and file errors come in many classes.
        raise UserError(
            f"cannot fetch the tokeniser {name!r} from the Hugging Face Hub ({type(error).__name__}); check the "
            "network, or give the path of its tokenizer.json with --tokenizer"
        ) from error


def _train(vocab_size: int, source: Source, heldout_fraction: float, workers: int, skip_bad_rows: bool) -> Tokenizer:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    budget = max(SAMPLE_BYTES, SAMPLE_BYTES_PER_ENTRY * vocab_size)
    tokenizer.train_from_iterator(_sample(source, heldout_fraction, budget, skip_bad_rows), trainer)
    return tokenizer


def _sample(source: Source, heldout_fraction: float, budget: int, skip_bad_rows: bool) -> Iterator[str]:
    """Yield training documents of at most ``budget`` bytes and one document more."""
    share = budget // min(source.parts, SAMPLE_PARTS)
    left = budget
    # Multiples of the golden ratio, modulo 1, are spread evenly however many of them are taken.
    for part in sorted(range(source.parts), key=lambda number: number * 0.6180339887498949 % 1):
        taken = min(share, left)
        for piece, _ in source.pieces(part):
            for document in documents_of(piece, skip_bad_rows):
                if taken > 0 and not is_heldout(document.utf8, heldout_fraction):
                    taken -= len(document.utf8)
                    left -= len(document.utf8)
                    yield document.text
            if taken <= 0:
                break
        if left <= 0:
            return


def _characters(source: Source, workers: int, skip_bad_rows: bool) -> Tokenizer:
    alphabet: set[str] = set()
    for characters in one_pass(source, partial(_CharactersOf, skip_bad_rows), workers):
        alphabet |= characters
    vocabulary = {character: index for index, character in enumerate(sorted(alphabet))}
    # A BPE without merges splits into characters, and needs no pattern to do it.
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([EOT_TOKEN])
    return tokenizer


class _CharactersOf:
    def __init__(self, skip_bad_rows: bool) -> None:
        self._skip_bad_rows = skip_bad_rows

    def __call__(self, block: Block) -> set[str]:
        documents = (document for piece in block.pieces for document in documents_of(piece, self._skip_bad_rows))
        return {character for document in documents for character in set(document.text)}
