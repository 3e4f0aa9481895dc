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


def torchrun_environment(processes: int) -> dict[str, str]:
    """This process's environment, with the cores shared out among ``processes`` unless the user has said how."""
    share = max(1, (os.cpu_count() or 1) // processes)
    return {"OMP_NUM_THREADS": str(share), **os.environ}


def torchrun_command(arguments: list[str], *, processes: int, log_folder: Path) -> list[str]:
    """The command line that trains on ``processes`` processes of this machine.

    ``arguments`` are those of ``torchtitan_ext.train``. The console shows the first rank; ``log_folder`` gets every
    rank's output.
    """
    return [
        sys.executable,
        # torchrun gives processes that were asked to stop 30 seconds by default: too few to save a large model.
        *("-m", "launch.elastic", "--standalone", "--nproc-per-node", str(processes), "--shutdown-timeout", "240"),
        *("--role", "rank", "--local-ranks-filter", "0", "--tee", "3", "--log-dir", str(log_folder)),
        *("-m", "torchtitan_ext.train", *arguments),
    ]
