"""How much processor time ``depth compare`` takes for 90 runs, as a multiple of that of another revision.

Writes run folders by formula: ten variants at three sizes with three seeds, 500 logged steps each, with what the models
note about themselves by depth. Both revisions read the same folders, one after the other, ``--repeats`` times; each
number is the least processor time (user and system, all child processes) of its repeats.

example: python benchmarks/compare_speed.py
example: python benchmarks/compare_speed.py --against 6ff84ea
"""

import argparse
import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import yaml

from torchtitan_ext.run_folder import RunFolder

VARIANTS = ("standard", *(f"variant_{letter}" for letter in "abcdefghi"))
SIZES = {"1.2M": 1.2e6, "5M": 5e6, "10M": 10e6}
SEEDS = 3
STEPS = 500
BATCH = 4096
LAYERS = 8
HERE = Path(__file__).resolve().parent.parent


def write_run(path: Path, variant: int, size: str, seed: int) -> None:
    """One finished run whose loss is a law of its size with noise of its own; every fourth look is one by depth."""
    noise = np.random.default_rng([variant, list(SIZES).index(size), seed])
    parameters = SIZES[size]
    end = 2.0 + 20 / parameters**0.15 - 0.01 * variant + 0.01 * noise.normal()
    folder = RunFolder(path)
    folder.create()
    data = {"fingerprint": "a", "heldout_fingerprint": "b", "vocab_size": 4096, "seq_len": 128, "seed": seed}
    identity = {"model": {"variant": VARIANTS[variant]}, "seed": seed, "data": {**data, "document_mask": False}}
    folder.write_facts(
        {
            "name": path.name,
            "size": size,
            "variant": VARIANTS[variant],
            "identity": identity,
            "parameters": parameters,
            "flops_per_token": 6 * parameters,
        }
    )
    run = {
        "name": path.name,
        "seed": seed,
        "model": {"size": size, "variant": VARIANTS[variant]},
        "data": {"path": "nowhere", "seq_len": 128, "seed": seed},
        "training": {"steps": STEPS, "batch_tokens": BATCH},
        "optimizer": {"lr": 1e-3},
        "heldout": {"every": 20, "tokens": 128000},
    }
    folder.write_run(yaml.safe_dump(run))
    lines = [record for step in range(1, STEPS + 1) for record in _records(step, end, variant, parameters, noise)]
    folder.metrics_path.write_text("".join(lines), encoding="utf-8")
    folder.write_status("finished", STEPS, STEPS)


def _records(step: int, end: float, variant: int, parameters: float, noise: np.random.Generator) -> list[str]:
    loss = end + 6.0 * float(np.exp(-step / 80)) + 0.02 * noise.normal()
    seconds = 0.4 * (1 + 0.03 * variant)
    training = {
        "loss_metrics/global_avg_loss": loss - 0.05,
        "loss_metrics/global_max_loss": loss,
        "grad_norm": 0.5 + 0.1 * float(noise.random()),
        "throughput/global_tokens_per_s": BATCH / seconds,
        "tflops": 0.1,
        "mfu(%)": 20.0,
        "time_metrics/end_to_end(s)": seconds,
        "time_metrics/data_loading(s)": 0.001,
        "memory/max_active(GiB)": 2.0 + 0.1 * variant,
        "memory/max_reserved(GiB)": 3.0,
        "progress/tokens": BATCH * step,
        "progress/train_flops": 6 * parameters * BATCH * step,
        "progress/train_seconds": seconds * step,
        **{f"lr/AdamW/{group}": 1e-3 * min(1.0, (STEPS - step) / 100) for group in range(3)},
    }
    found: list[dict[str, object]] = [training]
    if step % 20 == 0:
        found.append({"heldout/loss": loss, "heldout/bits_per_byte": loss / 3})
    if step % 100 == 0 and variant:
        looked: dict[str, object] = {}
        for series in ("gradient_norm", "attention_output_rms", "feed_forward_output_rms"):
            looked |= {f"depth/{series}/{layer:02d}": float(noise.random()) for layer in range(LAYERS)}
        looked["depth/weights"] = [[1 / (read + 1)] * (read + 1) for read in range(LAYERS)]
        found.append(looked)
    return [_line({"step": step, "time": 1.8e9 + step, **record}) for record in found]


def _line(record: dict[str, object]) -> str:
    return json.dumps(record) + "\n"


def write_runs(folder: Path) -> None:
    for size in SIZES:
        for variant in range(len(VARIANTS)):
            for seed in range(SEEDS):
                write_run(folder / f"{VARIANTS[variant]}-{size}-s{seed}", variant, size, seed)


def processor_seconds(code: Path, runs: Path, out: Path) -> float:
    """Of ``depth compare`` as the checkout ``code`` has it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "torchtitan_ext.cli", "compare", str(runs), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    subprocess.run(command, check=True, cwd=code, env=environment, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REVISION", help="of this repository, to be measured too")
    parser.add_argument("--repeats", type=int, default=1, help="of each measurement (default: 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_runs(folder / "runs")
        codes = {"this": HERE}
        if arguments.against:
            codes["other"] = folder / "code"
            git = ["git", "-C", str(HERE), "archive", arguments.against]
            with tarfile.open(fileobj=io.BytesIO(subprocess.run(git, check=True, capture_output=True).stdout)) as files:
                files.extractall(codes["other"], filter="data")
        taken = {called: float("inf") for called in codes}
        for _ in range(arguments.repeats):
            for called, code in codes.items():
                taken[called] = min(taken[called], processor_seconds(code, folder / "runs", folder / called))
    print(f"{len(VARIANTS) * len(SIZES) * SEEDS} runs, processor time")
    print(f"this code                {taken['this']:.1f} s")
    if arguments.against:
        print(f"{arguments.against:<24} {taken['other']:.1f} s")
        print(f"ratio                    {taken['this'] / taken['other']:.2f}")


if __name__ == "__main__":
    main()
