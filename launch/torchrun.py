"""Start training processes on this machine with torchrun."""

import os
import sys
from pathlib import Path


def default_processes() -> int:
    """One process per visible GPU; without a GPU two, or one on a single core."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(2, os.cpu_count() or 1)


def torchrun_command(arguments: list[str], *, processes: int, log_folder: Path) -> list[str]:
    """The command line that trains on ``processes`` processes of this machine.

    ``arguments`` are those of ``torchtitan_ext.train``. The console shows the first rank; ``log_folder`` gets every
    rank's output.
    """
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)),
        *("--local-ranks-filter", "0", "--tee", "3", "--log-dir", str(log_folder)),
        *("-m", "torchtitan_ext.train", *arguments),
    ]
