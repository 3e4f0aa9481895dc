"""What `depth plan` says of a run's memory against what training it takes, on the CPU.

Trains a variant of every family in each checkpointing mode for two steps (the second has the optimizer's moments) and
takes the most bytes that its tensors had at once, as PyTorch's profiler saw them being allocated and freed; the plan
comes from fake tensors. Every run has processes of its own.

example: python benchmarks/plan_accuracy.py data/books --ranks 2
"""

import argparse
import os
import socket
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torch.profiler._utils import traverse_dfs

from torchtitan_ext.resolve import KNOWN_NAMES, resolve
from torchtitan_ext.run_file import load_run
from torchtitan_ext.titan.config import trainer_config
from torchtitan_ext.titan.rehearsal import rehearsing

VARIANTS = ("standard", "control_block", "block_hybrid_memory", "attnres_block", "m_gate_kv", "moda")
MODES = ("none", "selective", "full")
STEPS = 2


def compare(dataset: Path, variant: str, mode: str, ranks: int, *more: str) -> tuple[int, int]:
    """Planned and measured peak bytes of a rank of the 10M size with 6 layers; ``more`` are further keys of the run."""
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder) / "run.yaml"
        run = {
            "folder": f"{folder}/run",
            "model": {"size": "10M", "layers": 6, "variant": variant},
            "data": {"path": str(dataset), "seq_len": 256},
            "training": {"steps": STEPS, "batch_tokens": 1024 * ranks, "micro_batch": 2, "activation_checkpoint": mode},
            "heldout": {"every": 0},
        }
        run_file.write_text(yaml.safe_dump(run))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with _processes(1) as pool:
            planned = pool.submit(_planned, str(run_file), list(more), ranks).result()
        with _processes(ranks) as pool:
            measured = max(pool.map(partial(_measured, str(run_file), list(more), ranks, port), range(ranks)))
    return planned, measured


def _processes(number: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(number, mp_context=get_context("fork"))


def _planned(run_file: str, more: list[str], ranks: int) -> int:
    resolved = resolve(load_run(run_file, more, known=KNOWN_NAMES), ranks)
    assert resolved.run.training.micro_batch is not None
    with rehearsing(resolved, on_cpu=True) as rehearsal:
        return sum(rehearsal.train(resolved.run.training.micro_batch).values())


def _measured(run_file: str, more: list[str], ranks: int, port: int, rank: int) -> int:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    resolved = resolve(load_run(run_file, more, known=KNOWN_NAMES), ranks)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        trainer = trainer_config(resolved).build()
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(STEPS):
            trainer.step += 1
            trainer.train_step(batches)
    return _peak(profiled.profiler.kineto_results.experimental_event_tree())


def _peak(events: list[Any]) -> int:
    """The most bytes allocated at once, but for those that gloo copies what it reduces into: NCCL makes no copies, and
    gloo's are freed by threads that the profiler does not see."""
    events = [event for event in traverse_dfs(events) if event.tag == _EventType.Allocation and not _by_gloo(event)]
    live: dict[int, int] = {}
    total = most = 0
    for event in sorted(events, key=lambda event: event.start_time_ns):
        place, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        total -= live.pop(place, 0)
        if size > 0:
            live[place] = size
            total += size
            most = max(most, total)
    return most


def _by_gloo(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("c10d::"):
            return True
        event = event.parent
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, help="a prepared data set")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model (default: 1)")
    args, more = parser.parse_known_args()
    print(f"{'variant':<22} {'checkpointing':<14} {'planned':>9} {'measured':>9} {'ratio':>6}   MiB")
    for variant in VARIANTS:
        for mode in MODES:
            planned, measured = compare(args.dataset, variant, mode, args.ranks, *more)
            print(
                f"{variant:<22} {mode:<14} {planned / 2**20:>9.1f} {measured / 2**20:>9.1f} {planned / measured:>6.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
