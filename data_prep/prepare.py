"""Turn a source of documents into a data set folder."""

import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from data_prep import consumed
from data_prep import journal as journals
from data_prep.digest import Digest
from data_prep.encode import SKIPPED_SHOWN, EncodedBlock, EncodedSplit, Encoder
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
from data_prep.passes import one_pass
from data_prep.progress import Progress
from data_prep.shards import ShardWriter
from data_prep.sources import Cursor, Source
from data_prep.tokenizer import build
from data_prep.vocabulary import Vocabulary, read_vocabulary, write_vocabulary
from torchtitan_ext.errors import UserError
from torchtitan_ext.files import write_file


def prepare(
    source: Source, settings: Settings, tokenizer: str, folder: Path, workers: int, skip_bad_rows: bool = False
) -> Manifest:
    """Write the data set folder, or finish it where an earlier call with the same settings was stopped.

    The contents depend on the settings and the source alone: not on ``workers``, nor on how often it was interrupted.
    Behind the place where an earlier call stopped, local files may have been repaired meanwhile.

    Args:
        source: the documents; closed at the end.
        settings: everything that decides the contents.
        tokenizer: how to get the tokeniser that ``settings.tokenizer`` identifies, for a folder that has none yet.
        folder: where to write; made if need be.
        workers: processes that tokenise.
        skip_bad_rows: leave out, and count, documents that cannot be used.

    Returns:
        The manifest of the finished folder.

    Raises:
        UserError: ``folder`` holds something else or is in use, the source is malformed or has changed where it has
            been read, or a split stays empty.
    """
    with closing(source):
        # Nothing is written to a folder that holds something else, not even the lock.
        journals.is_finished(folder, settings)
        with journals.locked(folder):
            workers = min(workers, source.most_workers)
            if journals.is_finished(folder, settings):
                manifest = read_manifest(folder / MANIFEST)
                consumed.check(folder, manifest.parts, source, Cursor(source.parts, 0), workers)
                journals.clear_working_files(folder)
                return manifest
            vocabulary = _vocabulary(source, settings, tokenizer, folder, workers, skip_bad_rows)
            journal = _Preparation(source, settings, vocabulary, folder, workers, skip_bad_rows).run()
            _check_splits(journal, folder)
            manifest = Manifest(
                settings=settings,
                tokenizer=TokenizerFile(kind=settings.tokenizer.split()[0], sha256=sha256(folder / TOKENIZER)),
                token_bytes_sha256=sha256(folder / TOKEN_BYTES),
                vocab_size=vocabulary.size,
                eot_id=vocabulary.eot_id,
                dtype=vocabulary.dtype,
                splits=journal.splits,
                parts=journal.parts,
                empty_rows=journal.empty_rows,
                skipped_rows=journal.skipped_rows,
            )
            write_file(folder / MANIFEST, manifest.to_json().encode())
            journals.clear_working_files(folder)
    return manifest


def _vocabulary(
    source: Source, settings: Settings, tokenizer: str, folder: Path, workers: int, skip_bad_rows: bool
) -> Vocabulary:
    """Read the tokeniser's files, written before the journal, or make them and begin the journal."""
    begun = journals.read_journal(folder) if (folder / journals.JOURNAL).exists() else None
    if begun is not None and begun.settings != settings:
        if begun.parts and settings.tokenizer == "characters":
            raise UserError(
                f"the source has changed since {folder} was begun, and its tokeniser has the characters that the "
                "source had then; prepare it with another --out"
            )
        kept = "what has been read of it is compared with it" if begun.parts else "nothing of it has been used yet"
        print(f"note: the source has changed since {folder} was begun; {kept}", file=sys.stderr, flush=True)
    # A folder without a single shard begins afresh, with a tokeniser of the source as it is now.
    if begun is None or (not begun.parts and begun.settings != settings):
        try:
            print(f"tokeniser: {tokenizer}", file=sys.stderr, flush=True)
            made = build(tokenizer, source, settings.heldout_fraction, workers, skip_bad_rows)
            print(write_vocabulary(made, settings.eot_token, folder), file=sys.stderr, flush=True)
            Journal(settings=settings).write(folder)
        except BaseException:
            source.close()
            journals.discard(folder)
            raise
    return read_vocabulary(folder, settings.eot_token)


class _Preparation:
    """Writes the shards that are missing. Each covers the next blocks, until a split has enough tokens for a shard."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        vocabulary: Vocabulary,
        folder: Path,
        workers: int,
        skip_bad_rows: bool,
    ) -> None:
        journal = journals.read_journal(folder)
        self._source, self._settings, self._folder, self._workers = source, settings, folder, workers
        self._files = source.files()
        self._start = consumed.check(folder, journal.parts, source, journal.cursor, workers)
        dtype = np.dtype(vocabulary.dtype)
        self._build = partial(
            Encoder,
            folder / TOKENIZER,
            vocabulary.token_bytes,
            vocabulary.eot_id,
            dtype,
            settings.heldout_fraction,
            skip_bad_rows,
        )
        self._writers = {name: ShardWriter(folder, name, dtype, len(journal.splits[name].shards)) for name in SPLITS}
        self._splits = dict(journal.splits)
        self._read = [consumed.digest_in(part) for part in journal.parts]
        self._work, self._empty, self._skipped = journal.work, journal.empty_rows, journal.skipped_rows

    def run(self) -> Journal:
        """Write them. Returns the journal of the finished work."""
        encoded = one_pass(self._source, self._build, self._workers, self._start)
        with closing(encoded), Progress(self._source.work, self._work, sys.stderr) as progress:
            for block in encoded:
                self._add(block)
                if max(writer.tokens for writer in self._writers.values()) >= self._settings.shard_tokens:
                    self._save(block.end)
                progress.advance(block.work, sum(len(split.tokens) for split in block.splits.values()))
        journal = self._save(Cursor(self._source.parts, 0))
        consumed.check_untouched(self._files, self._source)
        return journal

    def _add(self, block: EncodedBlock) -> None:
        for name in SPLITS:
            self._writers[name].add(block.splits[name].tokens)
            self._splits[name] = _counted(self._splits[name], block.splits[name])
        for part, digest in block.rows:
            self._read += [Digest()] * (part + 1 - len(self._read))
            self._read[part] = self._read[part].then(digest)
        for row in block.named[: max(0, SKIPPED_SHOWN - self._skipped)]:
            print(f"left out: {row}", file=sys.stderr, flush=True)
        self._work += block.work
        self._empty += block.empty
        self._skipped += block.skipped

    def _save(self, end: Cursor) -> Journal:
        for name in SPLITS:
            self._splits[name] = _with_shard(self._splits[name], self._writers[name].flush())
        # Files without a row count as read, too.
        self._read += [Digest()] * (end.part - len(self._read))
        saved = Journal(
            settings=self._settings,
            part=end.part,
            place=end.place,
            work=self._work,
            splits=dict(self._splits),
            parts=tuple(map(consumed.part_of, self._files, self._read)),
            empty_rows=self._empty,
            skipped_rows=self._skipped,
        )
        saved.write(self._folder)
        return saved


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
    separator = journal.settings.source.get("document_separator")
    if total == 0:
        message = "the source holds no text; every document is empty"
    elif total == 1:
        message = "the source is one document, which cannot be on both sides of the held-out cut; "
        if separator is None:
            message += "split it into documents with --document-separator, for example '\\n\\n'"
        else:
            message += f"the --document-separator {separator!r} does not occur in it, so give another"
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
