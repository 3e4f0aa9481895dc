"""Measure what variants cost beside `standard`: time, memory and start-up, on whatever device is there.

Every model is built as a run builds it and trains in a process of its own. They take turns (A B C, B C A, …), so that a
machine that slows down slows all of them, and each turn's ratio to `standard` is taken within the turn. Without a run
file the models train on random tokens, one pass for each step. Keys of a run file can be set as --key=value.

examples:
  depth bench --variants control_block m_gate_kv --size 10M --seq-len 512
  depth bench train_configs/fineweb_500m.yaml --variants control_block --compile
  depth bench mine.yaml theirs.yaml           (runs that differ in their variant alone)
  depth bench --variants moda --turns 0       (memory alone)
  depth bench --operation depth_read          (the arithmetic alone)
"""

import argparse
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_ext.errors import UserError

from . import SIZE, VARIANTS, VOCABULARY, operation, report

if TYPE_CHECKING:
    from torchtitan_ext.resolve import ResolvedRun

TAKES_OVERRIDES = True

KEYS = {
    "size": "model.size",
    "seq_len": "data.seq_len",
    "micro_batch": "training.micro_batch",
    "compile": "training.compile",
    "checkpoint": "training.activation_checkpoint",
    "precision": "training.precision",
}
"""Options that stand for keys of the run file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_files", nargs="*", metavar="RUN_FILE", help="settings, or the runs to compare")
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        default=[],
        help=f"instead of the run file's (without one: {' '.join(VARIANTS)}); named twice, a model is "
        "compared with its double",
    )
    parser.add_argument("--size", help=f"model.size (without a run file: {SIZE})")
    parser.add_argument("--seq-len", help="data.seq_len, in tokens")
    parser.add_argument("--micro-batch", help="training.micro_batch, in sequences")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="training.compile")
    parser.add_argument("--checkpoint", help="training.activation_checkpoint: none, selective or full")
    parser.add_argument("--precision", help="training.precision: auto, bf16 or fp32")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help=f"train on random tokens of so large a vocabulary (without a run file: {VOCABULARY})",
    )
    parser.add_argument("--nproc", type=int, default=1, help="processes, and GPUs, for each model (default: 1)")
    parser.add_argument(
        "--turns",
        type=int,
        default=6,
        help="turns of each model, after one to warm up (default: 6; 0: memory and start-up alone)",
    )
    parser.add_argument("--steps-per-turn", type=int, default=5, help="training steps in a turn (default: 5)")
    parser.add_argument("--out", type=Path, help="folder for bench.md and bench.json (default: runs/bench/<time>)")
    operation.add_arguments(parser.add_argument_group("one operation instead of models"))


def run(args: argparse.Namespace) -> int:
    _check(args)
    out = args.out or Path("runs/bench") / datetime.now().strftime("%Y-%m-%d-%H%M%S")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; name a folder")
    if args.operation is not None:
        title, parts, record = operation.compare(args)
    else:
        with tempfile.TemporaryDirectory(prefix="depth-bench-") as scratch:
            title, parts, record = _compare_models(args, Path(scratch))
    print(f"{title}\n\n{report.as_text(parts)}")
    report.save(out, title, parts, record)
    print(f"\nsaved to {out}")
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("turns", 0), ("steps_per_turn", 1), ("nproc", 1), ("vocab_size", 64)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be {least} or more")
    if args.operation is not None:
        of_models = [*args.run_files, *args.variants, *args.overrides, *_keys(args)]
        if of_models or args.vocab_size is not None or args.nproc != 1:
            raise UserError(
                "--operation measures one operation, without a model; leave out run files, --variants, --nproc and "
                "keys of the run file, or leave out --operation"
            )
    for file in args.run_files:
        if not file.endswith((".yaml", ".yml")):
            raise UserError(f"{file} is no run file (.yaml); a key of the run file is set as --key=value")


def _compare_models(args: argparse.Namespace, scratch: Path) -> report.Report:
    import torch

    from .contenders import Request, contenders
    from .summary import summarise
    from .turns import measure

    gpus = torch.cuda.device_count()
    if gpus and args.nproc > gpus:
        raise UserError(f"--nproc {args.nproc}, but {gpus} GPU(s) are visible; each process needs one of its own")
    models = contenders(
        Request(args.run_files, args.variants, [*args.overrides, *_keys(args)], args.vocab_size, args.nproc), scratch
    )
    measured = measure(models, ranks=args.nproc, turns=args.turns, steps=args.steps_per_turn)
    rows = summarise(measured, steps=args.steps_per_turn, ranks=args.nproc)
    machine = report.machine(measured[0].setup.device)
    record = {
        "kind": "models",
        "machine": machine,
        "processes": args.nproc,
        "turns": args.turns,
        "steps_per_turn": args.steps_per_turn,
        "models": report.record_of(rows, measured),
    }
    return (
        f"{_describe(models[0].resolved)}; {machine['device']}, torch {machine['torch']}",
        report.tables(rows),
        record,
    )


def _keys(args: argparse.Namespace) -> list[str]:
    given = {key: getattr(args, name) for name, key in KEYS.items()}
    words = {True: "true", False: "false"}
    return [f"--{key}={words.get(value, value)}" for key, value in given.items() if value is not None]


def _describe(resolved: "ResolvedRun") -> str:
    run, shape = resolved.run, resolved.shape
    training, seq_len = run.training, run.data.seq_len
    assert training.micro_batch is not None
    passes = resolved.batch_tokens // (seq_len * training.micro_batch * resolved.ranks)
    return (
        f"{run.model.size}: {shape.layers} layers of width {shape.width}; {resolved.ranks} process(es), each "
        f"{passes} pass(es) a step of {training.micro_batch} x {seq_len} tokens; precision {training.precision}, "
        f"{'compiled' if training.compile else 'not compiled'}, checkpointing {training.activation_checkpoint}"
    )
