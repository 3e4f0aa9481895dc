"""Prepare a small corpus, run a study of two variants on it, stop half-way, resume, finish, and show what came out.

Needs no network. The study is train_configs/studies/cpu_demo.yaml in its smallest form.

example: depth quickstart
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from launch.torchrun import default_processes
from torchtitan_ext.errors import UserError
from torchtitan_ext.orphans import stop_with_parent
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.shipped import RUN_FILES

STUDY_FILE = RUN_FILES / "studies" / "cpu_demo.yaml"
SMALLEST = [
    *("--name", "quickstart", "--variants", "[standard, control_block]", "--seeds", "[0]", "--sizes", "[1.2M]"),
    *("--set.training.steps", "60"),
]
"""Keys of the study, for minutes on two cores."""
DATA = Path("data/quickstart")
STUDY = Path("runs/quickstart")
FIRST = STUDY / "standard-1.2M-s0"
VOCABULARY = "bpe:1024"
STOPPED = 130
"""Exit status of a study that was asked to stop."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, default=None, help="processes (default: one per GPU; 2 without a GPU)")


def run(args: argparse.Namespace) -> int:
    processes = args.nproc if args.nproc is not None else default_processes()
    began = time.perf_counter()
    shutil.rmtree(STUDY, ignore_errors=True)

    _say(1, f"preparing a corpus that Python ships in {DATA}")
    prepare = [*_depth("prep"), "builtin", "--tokenizer", VOCABULARY, "--heldout-fraction", "0.05", "--out", str(DATA)]
    if subprocess.run(prepare).returncode:
        raise UserError("the corpus could not be prepared; see above")

    folder = RunFolder(FIRST)
    command = [*_depth("study"), "run", str(STUDY_FILE), *SMALLEST, "--nproc", str(processes)]
    _say(2, f"a study of two variants, each on {processes} processes with FSDP2, to be stopped half-way in the first")
    status = _study(command, stop_when=lambda: _step(folder) >= _steps(folder) // 2)
    if status != STOPPED:
        raise UserError(f"the study left with status {status} before it was stopped; see above")
    stopped_at = _step(folder)

    _say(3, f"stopped after step {stopped_at}, which was saved; the same command resumes from there")
    if _study(command, stop_when=None):
        raise UserError(f"the study did not finish; {FIRST.parent} has each run's logs")

    _say(4, f"finished in {time.perf_counter() - began:.0f} s")
    print(summary(folder, stopped_at))
    return 0


def summary(folder: RunFolder, stopped_at: int) -> str:
    """The run in a few lines, and how to look at its curves."""
    records = list(folder.metrics())
    steps = [record for record in records if "loss_metrics/global_avg_loss" in record]
    heldout = [record for record in records if "heldout/loss" in record]
    facts = folder.facts()
    rows = [
        ("run", folder.path.name),
        ("parameters", f"{facts['parameters']:,}"),
        ("steps", f"{steps[-1]['step']} (stopped and resumed at {stopped_at})"),
        ("tokens", f"{steps[-1]['progress/tokens']:,}"),
        ("loss at start", f"{steps[0]['loss_metrics/global_avg_loss']:.3f}"),
        ("loss at end", f"{steps[-1]['loss_metrics/global_avg_loss']:.3f}"),
        (
            "held-out loss",
            f"{heldout[-1]['heldout/loss']:.3f} ({heldout[-1]['heldout/bits_per_byte']:.3f} bits per byte)",
        ),
        ("tokens/s", f"{steps[-1]['progress/tokens'] / steps[-1]['progress/train_seconds']:,.0f}"),
        ("peak memory", f"{max(step['memory/max_reserved(GiB)'] for step in steps):.2f} GiB per process"),
    ]
    lines = [f"  {name:<14} {value}" for name, value in rows]
    return "\n".join(["", *lines, "", "curves:", f"  tensorboard --logdir {folder.path.parent}", ""])


def _study(command: list[str], stop_when: Callable[[], bool] | None) -> int:
    """Run the study, stopped when ``stop_when`` says so; returns its exit status."""
    process = subprocess.Popen(command, process_group=0, preexec_fn=stop_with_parent)
    try:
        while process.poll() is None:
            if stop_when is not None and stop_when():
                process.send_signal(signal.SIGTERM)
                return process.wait()
            time.sleep(0.2)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    return process.returncode


def _depth(command: str) -> list[str]:
    return [sys.executable, "-m", "torchtitan_ext.cli", command]


def _step(folder: RunFolder) -> int:
    status = folder.status()
    return status["step"] if status else 0


def _steps(folder: RunFolder) -> int:
    status = folder.status()
    return status["steps"] if status else sys.maxsize


def _say(number: int, text: str) -> None:
    print(f"\n[{number}/4] {text}", flush=True)
