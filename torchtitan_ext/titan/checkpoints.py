"""Distributed checkpoints that are whole or absent, kept by number and by milestone.

torchtitan's checkpoint manager with three changes. A checkpoint is written under a temporary name, listed with its
files' sizes and renamed, so a crash leaves no half-written step. A checkpoint whose files do not match its list is
reported and passed over for an earlier one. The last few are kept, and every milestone for ever.
"""

import json
import os
import re
import shutil
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.logging import logger

from torchtitan_ext.files import write_file

FILE_LIST = "files.json"


class Checkpoints(CheckpointManager):
    """torchtitan's ``CheckpointManager`` for a run folder. ``interval`` is in steps; ``milestones`` are steps kept for
    ever."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        keep_last: int = 2
        milestones: list[int] = field(default_factory=list)

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.keep_last = config.keep_last
        self.milestones = frozenset(config.milestones)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future | AsyncSaveResponse | None:
        final = Path(checkpoint_id)
        temporary = final.with_name(f".{final.name}.tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier()
        result = super().dcp_save(state_dict, str(temporary), async_mode, enable_garbage_collection, to_hf)
        if dist.get_rank() == 0:
            write_file_list(temporary)
            if final.exists():
                shutil.rmtree(final)
            os.replace(temporary, final)
            self._purge()
        dist.barrier()
        return result

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step) or curr_step in self.milestones

    def _find_load_step(self, folder: str = "") -> int:
        """The newest whole checkpoint's step, or -1."""
        for step in reversed(saved_steps(folder or self.folder)):
            damage = damage_of(Path(folder or self.folder) / f"step-{step}")
            if damage is None:
                return step
            logger.error(f"{damage}; the checkpoint of step {step} is passed over for an earlier one")
        return -1

    def _purge(self) -> None:
        steps = saved_steps(self.folder)
        for step in steps[: -self.keep_last]:
            if step not in self.milestones:
                shutil.rmtree(Path(self.folder) / f"step-{step}", ignore_errors=True)


def write_file_list(checkpoint: Path) -> None:
    """List a finished checkpoint's files with their sizes: only then does ``damage_of`` find it whole."""
    sizes = {file.name: file.stat().st_size for file in sorted(checkpoint.iterdir())}
    write_file(checkpoint / FILE_LIST, json.dumps(sizes, indent=1).encode())


def saved_steps(folder: str | Path) -> list[int]:
    """The steps of the finished checkpoints in ``folder``, in order, whether whole or damaged."""
    if not Path(folder).is_dir():
        return []
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in Path(folder).iterdir()]
    return sorted(int(name[1]) for name in names if name)


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None when every file is there with its size."""
    try:
        sizes = json.loads((checkpoint / FILE_LIST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return f"{checkpoint / FILE_LIST} is missing or damaged"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.exists():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, {size} were written"
    return None
