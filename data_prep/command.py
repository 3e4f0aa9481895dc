"""The ``depth prep`` command: a source of text → a data set folder."""

import argparse
import os
import sys
from pathlib import Path

from data_prep.journal import DOWNLOADS
from data_prep.manifest import Manifest, Settings
from data_prep.prepare import prepare
from data_prep.sources import FINEWEB_EDU, BuiltinSource, HubSource, LocalSource, Source
from data_prep.tokenizer import identity
from torchtitan_ext.errors import UserError

DESCRIPTION = "Turn text into a data set folder of token shards. The same command continues an interrupted run."
EXAMPLES = r"""
examples:
  depth prep fineweb-edu --config sample-10BT --tokenizer gpt2 --out data/fineweb-edu-10BT
  depth prep 'corpus/*.parquet' --tokenizer bpe:4096 --out data/corpus
  depth prep plays.txt --document-separator '\n\n' --tokenizer characters --heldout-fraction 0.1 --out data/plays
  depth prep builtin --tokenizer bpe:1024 --heldout-fraction 0.05 --out data/builtin
"""
DEFAULT_CONFIG = "sample-10BT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments on ``parser``."""
    parser.description = DESCRIPTION
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "source",
        nargs="+",
        help="fineweb-edu (downloaded from the Hugging Face Hub), builtin (the text that comes with Python), or paths, "
        "folders or globs of local .parquet, .jsonl and .txt files (text also as .gz, .bz2 or .zst)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="the data set folder to write")
    parser.add_argument(
        "--tokenizer",
        default="gpt2",
        help="gpt2, characters, bpe:VOCAB (byte-level BPE trained on a sample of the source), or the path of a "
        "tokenizer.json (default: gpt2)",
    )
    parser.add_argument(
        "--eot-token", metavar="TOKEN", help="the tokeniser's end-of-text token, when it is not the one that is found"
    )
    parser.add_argument(
        "--config",
        help="configuration of fineweb-edu, or of a folder with a copy of such a repository: sample-10BT, "
        f"sample-100BT, default, ... (of fineweb-edu: {DEFAULT_CONFIG})",
    )
    parser.add_argument("--revision", help="revision of fineweb-edu: a commit, branch or tag (default: the newest)")
    parser.add_argument(
        "--text-column", default="text", metavar="NAME", help="Parquet column or JSON key of the text (default: text)"
    )
    parser.add_argument(
        "--document-separator",
        type=_unescaped,
        metavar="STRING",
        help=r"what separates the documents of a text file, with \n, \r and \t understood; it is no part of them. "
        "Line ends of Windows match, too. Without it a text file is one document. A corpus in one file needs it: the "
        "held-out split is cut between documents",
    )
    parser.add_argument(
        "--heldout-fraction",
        type=_fraction,
        default=0.005,
        metavar="F",
        help="share of the documents kept out of training, chosen by a hash of their text without white space and case "
        "(default: 0.005)",
    )
    parser.add_argument(
        "--skip-bad-rows",
        action="store_true",
        help="leave out, name and count documents that cannot be used (no text, no Unicode, too much for the "
        "tokeniser) instead of stopping at the first",
    )
    parser.add_argument(
        "--shard-tokens",
        type=_positive,
        default=1 << 23,
        metavar="N",
        help="a shard ends at the first block of documents that brings it to N tokens; "
        "an interrupted run loses at most the unfinished shard (default: 8388608)",
    )
    parser.add_argument(
        "--workers",
        type=_positive,
        default=_cores(),
        metavar="N",
        help="processes that tokenise (default: one per core)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. Returns its exit status: 0, or 130 when interrupted; raises ``UserError``."""
    try:
        source = _source(args)
        for note in source.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
        settings = Settings(
            source=source.describe(),
            tokenizer=identity(args.tokenizer),
            eot_token=args.eot_token,
            heldout_fraction=args.heldout_fraction,
            shard_tokens=args.shard_tokens,
        )
        manifest = prepare(source, settings, args.tokenizer, args.out, args.workers, args.skip_bad_rows)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command continues {args.out} after its last finished shard", file=sys.stderr)
        return 130
    except OSError as error:
        raise UserError(
            f"{error.filename or args.out}: {error.strerror or error}; put that right and run the same command again "
            "to continue"
        ) from error
    print(_summary(args.out, manifest))
    if manifest.empty_rows:
        print(f"note: {manifest.empty_rows:,} rows have no text, and are no documents", file=sys.stderr)
    if manifest.skipped_rows:
        print(f"note: {manifest.skipped_rows:,} rows that could not be used were left out", file=sys.stderr)
    for name, split in manifest.splits.items():
        if split.bytes != split.token_bytes:
            print(
                f"note: the tokeniser changes the text: the {name} tokens stand for {split.token_bytes:,} bytes, "
                f"the text has {split.bytes:,}; bits per byte are off by that ratio",
                file=sys.stderr,
            )
    return 0


def _source(args: argparse.Namespace) -> Source:
    name = args.source[0] if len(args.source) == 1 else None
    if name == "fineweb-edu":
        config = args.config or DEFAULT_CONFIG
        return HubSource(FINEWEB_EDU, config, args.revision, args.text_column, args.out / DOWNLOADS)
    if args.revision is not None:
        raise UserError("--revision is for the source fineweb-edu only; leave it out")
    if name == "builtin":
        if args.config is not None:
            raise UserError("--config is for the source fineweb-edu only; leave it out")
        return BuiltinSource()
    return LocalSource(args.source, args.text_column, args.document_separator, args.config)


def _summary(folder: Path, manifest: Manifest) -> str:
    splits = ", ".join(
        f"{name} {split.tokens:,} tokens in {split.documents:,} documents" for name, split in manifest.splits.items()
    )
    return f"{folder}: {splits}; vocabulary {manifest.vocab_size:,}; fingerprint {manifest.fingerprint}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return number


def _fraction(text: str) -> float:
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"{text} does not lie between 0 and 1")
    return number


def _unescaped(text: str) -> str:
    plain = text.replace("\\r", "\r").replace("\\n", "\n").replace("\\t", "\t")
    if not plain:
        raise argparse.ArgumentTypeError("the separator is empty; without the option each file is one document")
    return plain
