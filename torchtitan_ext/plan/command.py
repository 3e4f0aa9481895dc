"""Say what a run needs before it is queued: memory per GPU by part, the largest micro-batch that fits, tokens/s and
hours, beside what the standard residual would need. Nothing is allocated, and no GPU and no data set are needed.

example: depth plan train_configs/fineweb_500m.yaml --gpu B200 --gpus 8 --model.variant control_block
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from data_prep.manifest import MANIFEST
from torchtitan_ext.errors import UserError
from torchtitan_ext.gpus import ASSUMED_MFU, GPUS, Speed, gpu_of
from torchtitan_ext.resolve import KNOWN_NAMES, ResolvedRun, planned_dataset, resolve
from torchtitan_ext.run_file import Run, load_run

TAKES_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", help="a YAML run file; any of its keys can be set after it, as for `depth train`")
    parser.add_argument("--gpu", default="B200", help=f"one of {', '.join(GPUS)} (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=8, help="how many, over all nodes (default: %(default)s)")
    parser.add_argument(
        "--mfu",
        type=float,
        default=ASSUMED_MFU,
        help="share of the GPUs' bf16 FLOP/s that the run reaches (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=None, help="tokens in the vocabulary of a data set that is not prepared yet"
    )


def run(args: argparse.Namespace) -> int:
    gpu, assumed = gpu_of(args.gpu), Speed(args.gpu, args.mfu)
    if args.gpus < 1:
        raise UserError(f"--gpus {args.gpus} is no number of GPUs; give 1 or more")
    if args.vocab_size is not None and args.vocab_size < 1:
        raise UserError(f"--vocab-size {args.vocab_size} is no vocabulary; give 1 token or more")
    resolved = _resolve(load_run(args.run_file, args.overrides, known=KNOWN_NAMES), args.gpus, args.vocab_size)
    # After all that can be wrong has been found: these import torch.
    from torchtitan_ext.plan.plan import need_of, remedies, standard_of
    from torchtitan_ext.plan.table import disk_and_text, head, memory_table, speed

    print(head(resolved, args.gpu.upper(), gpu))
    runs = [resolved] if resolved.run.model.variant == "standard" else [resolved, standard_of(resolved)]
    needs = [need_of(each, gpu.usable, partial(_announce, each.run.model.variant)) for each in runs]
    _end_line()
    print(memory_table(needs, gpu))
    print(speed(runs, assumed))
    print(disk_and_text(resolved))
    need, micro_batch = needs[0], resolved.run.training.micro_batch
    if need.memory.peak <= gpu.usable:
        return 0
    where = (
        f"{resolved.run.origin('training.micro_batch')}: micro-batch {micro_batch} does not fit on {args.gpu.upper()}"
    )
    if need.largest is not None:
        raise UserError(f"{where}; --training.micro_batch {need.largest} does")

    def with_gpus(gpus: int) -> ResolvedRun | None:
        one = resolved.run.training.model_copy(update={"micro_batch": 1})
        try:
            return _resolve(resolved.run.model_copy(update={"training": one}), gpus, args.vocab_size)
        except UserError:
            return None

    larger = [(other, kind.usable) for other, kind in GPUS.items() if kind.memory > gpu.memory]
    choices = remedies(resolved, gpu.usable, larger, with_gpus)
    raise UserError(
        f"{where}, nor does 1; "
        + (
            f"what would fit: {'; or '.join(choices)}"
            if choices
            else "no GPU, checkpointing or 16 times as many GPUs do"
        )
    )


def _announce(variant: str, micro_batch: int) -> None:
    """Say on a terminal what is being done, in one line that the next call replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[Krehearsing {variant}, micro-batch {micro_batch} …", end="", file=sys.stderr, flush=True)


def _end_line() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _resolve(run: Run, gpus: int, vocab_size: int | None) -> ResolvedRun:
    try:
        return resolve(run, gpus, planned_dataset(run, vocab_size))
    except UserError as error:
        if vocab_size is None and not Path(run.data.path, MANIFEST).is_file():
            raise UserError(f"{error}; to plan without it give its vocabulary, such as --vocab-size 50257") from None
        raise
