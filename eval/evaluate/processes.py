"""One job on several processes: every process runs it, scores its share, and sums are added up between them."""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.synchronize import Lock
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tqdm import tqdm

from torchtitan_ext.errors import UserError


@dataclass(frozen=True)
class Processes:
    """This process among those that share a job."""

    rank: int = 0
    ranks: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def add_up(self, array: np.ndarray) -> None:
        """Replace ``array`` by its sum over all processes, in place."""
        if self.ranks > 1:
            dist.all_reduce(torch.from_numpy(array))

    def gather(self, thing: Any) -> list[Any]:
        """``thing`` of every process, in order, on all of them."""
        things = [thing] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(things, thing)
        return things

    def progress(self, title: str, work: int) -> tqdm:
        """A bar on the first process, if a terminal is there to see it."""
        shape = "{desc} {percentage:3.0f}% |{bar}| {elapsed} elapsed, {remaining} left"
        return tqdm(total=work, desc=title, bar_format=shape, disable=None if self.first else True, leave=False)


def device_of(rank: int) -> torch.device:
    """The accelerator of a process on this machine, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, rank % torch.accelerator.device_count())


def default_processes() -> int:
    """One per accelerator; without one a single process, which uses all cores."""
    return max(1, torch.accelerator.device_count())


def share_out(processes: int, job: Callable[..., None], *arguments: Any) -> int:
    """Run ``job(processes, *arguments)`` on this many processes of this machine, or on those that torchrun started.

    Returns an exit status: 0, 130 after Ctrl-C, or 2 after a ``UserError`` on one of them, which that one has printed.
    """
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        job(Processes(dist.get_rank(), dist.get_world_size()), *arguments)
        dist.destroy_process_group()
        return 0
    if processes == 1:
        job(Processes(), *arguments)
        return 0
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_start, (processes, str(Path(folder) / "store"), context.Lock(), job, arguments), nprocs=processes)
        except mp.ProcessExitedException as ended:
            if ended.exit_code not in (2, 130):
                raise
            return ended.exit_code
    return 0


def _start(
    rank: int, ranks: int, store: str, first_to_fail: Lock, job: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        job(Processes(rank, ranks), *arguments)
    except UserError as error:
        # One line, from the first that notices: what is wrong is mostly wrong for all of them.
        if first_to_fail.acquire(block=False):
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    dist.destroy_process_group()
