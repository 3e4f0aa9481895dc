"""Turn a source of documents into a data set folder."""

import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from data_prep import journal as journals
from data_prep.encode import EncodedSplit, Encoder
from data_prep.files import sha256
from data_prep.journal import Journal
from data_prep.manifest import (
    MANIFEST,
    SPLITS,
    TOKEN_BYTES,
    TOKENIZER,
    Manifest,
    Settings,
    Shard,
    Split,
    TokenizerFile,
    read_manifest,
)
from data_prep.progress import Progress
from data_prep.shards import ShardWriter
from data_prep.sources import Cursor, Source, blocks
from data_prep.tokenizer import build
from data_prep.vocabulary import Vocabulary, read_vocabulary, write_vocabulary
from data_prep.workers import ordered_map
from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file


def prepare(source: Source, settings: Settings, tokenizer: str, folder: Path, workers: int) -> Manifest:
    """Write the data set folder, or finish it where an earlier call with the same settings was stopped.

    The contents depend on the settings and the source alone: not on ``workers``, nor on how often it was interrupted.

    Args:
        source: the documents.
        settings: everything that decides the contents.
        tokenizer: how to get the tokeniser that ``settings.tokenizer`` identifies, for a folder that has none yet.
        folder: where to write; made if need be.
        workers: processes that tokenise.

    Returns:
        The manifest of the finished folder.

    Raises:
        UserError: ``folder`` holds something else or is in use, the source is malformed, or a split stays empty.
    """
    # Nothing is written to a folder that holds something else, not even the lock.
    journals.is_finished(folder, settings)
    with journals.locked(folder):
        if journals.is_finished(folder, settings):
            journals.clear_working_files(folder)
            return read_manifest(folder / MANIFEST)
        workers = min(workers, source.most_workers)
        vocabulary = _vocabulary(source, settings, tokenizer, folder, workers)
        journal = _encode(source, vocabulary, folder, workers)
        _check_splits(journal, folder)
        manifest = Manifest(
            settings=settings,
            tokenizer=TokenizerFile(kind=settings.tokenizer.split()[0], sha256=sha256(folder / TOKENIZER)),
            token_bytes_sha256=sha256(folder / TOKEN_BYTES),
            vocab_size=vocabulary.size,
            eot_id=vocabulary.eot_id,
            dtype=vocabulary.dtype,
            splits=journal.splits,
        )
        write_file(folder / MANIFEST, manifest.to_json().encode())
        journals.clear_working_files(folder)
    return manifest


def _vocabulary(source: Source, settings: Settings, tokenizer: str, folder: Path, workers: int) -> Vocabulary:
    """Read the tokeniser's files, written before the journal, or make them and begin the journal."""
    if not (folder / journals.JOURNAL).exists():
        try:
            print(f"tokeniser: {tokenizer}", file=sys.stderr, flush=True)
            made = build(tokenizer, source, settings.heldout_fraction, workers)
            write_vocabulary(made, settings.eot_token, folder)
            Journal(settings=settings).write(folder)
        except BaseException:
            journals.discard(folder)
            raise
    return read_vocabulary(folder, settings.eot_token)


def _encode(source: Source, vocabulary: Vocabulary, folder: Path, workers: int) -> Journal:
    """Write the shards that are missing. Each covers the next blocks, until a split has enough tokens for a shard."""
    journal = journals.read_journal(folder)
    settings = journal.settings
    dtype = np.dtype(vocabulary.dtype)
    encoder = partial(
        Encoder, folder / TOKENIZER, vocabulary.token_bytes, vocabulary.eot_id, dtype, settings.heldout_fraction
    )
    writers = {name: ShardWriter(folder, name, dtype, len(journal.splits[name].shards)) for name in SPLITS}
    counts = dict(journal.splits)
    cursor, work = journal.cursor, journal.work

    def save(end: Cursor) -> Journal:
        for name in SPLITS:
            counts[name] = _with_shard(counts[name], writers[name].flush())
        saved = Journal(settings=settings, part=end.part, piece=end.piece, work=work, splits=dict(counts))
        saved.write(folder)
        return saved

    encoded = ordered_map(encoder, blocks(source, cursor), workers)
    with closing(encoded), Progress(source.work, work, sys.stderr) as progress:
        for block in encoded:
            for name in SPLITS:
                writers[name].add(block.splits[name].tokens)
                counts[name] = _counted(counts[name], block.splits[name])
            work += block.work
            if max(writer.tokens for writer in writers.values()) >= settings.shard_tokens:
                save(block.end)
            progress.advance(block.work, sum(len(split.tokens) for split in block.splits.values()))
    return save(Cursor(source.parts, 0))


def _counted(split: Split, block: EncodedSplit) -> Split:
    return split.model_copy(
        update={
            "tokens": split.tokens + len(block.tokens),
            "documents": split.documents + block.documents,
            "bytes": split.bytes + block.bytes,
            "token_bytes": split.token_bytes + block.token_bytes,
        }
    )


def _with_shard(split: Split, shard: Shard | None) -> Split:
    return split.model_copy(update={"shards": (*split.shards, shard)}) if shard else split


def _check_splits(journal: Journal, folder: Path) -> None:
    """Raise ``UserError`` when a split is empty, and clear the folder, as only other settings can help."""
    documents = {name: journal.splits[name].documents for name in SPLITS}
    total = sum(documents.values())
    fraction = journal.settings.heldout_fraction
    if total == 0:
        message = "the source holds no text; every document is empty"
    elif total == 1:
        message = (
            "the source is one document, which cannot be on both sides of the held-out cut; split it into documents "
            "with --document-separator, for example '\\n\\n'"
        )
    elif documents["heldout"] == 0:
        message = (
            f"none of the {total} documents fell into the held-out split; raise --heldout-fraction from {fraction:g} "
            f"to {min(0.5, max(2 * fraction, 10 / total)):.3g}, or split the text into more documents"
        )
    elif documents["train"] == 0:
        message = f"all {total} documents fell into the held-out split; lower --heldout-fraction from {fraction:g}"
    else:
        return
    journals.discard(folder)
    raise UserError(f"{folder}: {message}")
