"""Prepare a small corpus, train on it, stop half-way, resume, finish, and show what came out. Needs no network.

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

from launch.torchrun import default_processes, torchrun_command, torchrun_environment
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder

RUN_FILE = Path(__file__).resolve().parent.parent / "train_configs" / "quickstart.yaml"
DATA = Path("data/quickstart")
RUN = Path("runs/quickstart")
VOCABULARY = "bpe:1024"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=int, default=None, help="processes (default: one per GPU; 2 without a GPU)")


def run(args: argparse.Namespace) -> int:
    processes = args.nproc if args.nproc is not None else default_processes()
    began = time.perf_counter()
    shutil.rmtree(RUN, ignore_errors=True)

    _say(1, f"preparing a corpus that Python ships in {DATA}")
    prepare = [sys.executable, "-m", "torchtitan_ext.cli", "prep", "builtin", "--tokenizer", VOCABULARY]
    if subprocess.run([*prepare, "--out", str(DATA), "--heldout-fraction", "0.05"]).returncode:
        raise UserError("the corpus could not be prepared; see above")

    folder = RunFolder(RUN)
    command = torchrun_command(["--config-file", str(RUN_FILE)], processes=processes, log_folder=RUN / "logs")
    _say(2, f"training on {processes} processes with FSDP2, to be stopped half-way")
    _train(command, processes, stop_when=lambda: _step(folder) >= _steps(folder) // 2)
    stopped_at = _step(folder)

    _say(3, f"stopped after step {stopped_at}, which was saved; the same command resumes from there")
    _train(command, processes, stop_when=None)

    status = folder.status() or {}
    if status.get("state") != "finished":
        raise UserError(
            f"the run did not finish (state: {status.get('state')}); {RUN / 'logs'} has what each process printed"
        )
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


def _train(command: list[str], processes: int, stop_when: Callable[[], bool] | None) -> None:
    process = subprocess.Popen(command, env=torchrun_environment(processes))
    try:
        while process.poll() is None:
            if stop_when is not None and stop_when():
                process.send_signal(signal.SIGTERM)
                process.wait()
            time.sleep(0.2)
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    if stop_when is None and process.returncode:
        raise UserError(
            f"training failed (exit status {process.returncode}); {RUN / 'logs'} has what each process printed"
        )


def _step(folder: RunFolder) -> int:
    status = folder.status()
    return status["step"] if status else 0


def _steps(folder: RunFolder) -> int:
    status = folder.status()
    return status["steps"] if status else sys.maxsize


def _say(number: int, text: str) -> None:
    print(f"\n[{number}/4] {text}", flush=True)
