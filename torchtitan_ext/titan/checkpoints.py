"""Distributed checkpoints that are whole or absent, kept by number and by milestone.

torchtitan's checkpoint manager with these changes. Nothing is saved that is not finite. A checkpoint is written under a
temporary name, listed with its files' sizes and checksums and renamed, so a crash leaves no half-written step. The
first rank says which checkpoint all of them load. One whose files do not match its list is reported and passed over for
an earlier one, but a run that has been saved never begins anew by itself. The last few whole ones are kept, and every
milestone for ever.
"""

import errno
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.base import MODEL, OPTIMIZER
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.tools.logging import logger

from torchtitan_ext.errors import Diverged, UserError
from torchtitan_ext.files import flush_folder
from torchtitan_ext.run_folder import RunFolder

from .checkpoint_files import (
    Damage,
    Listed,
    check_contents,
    checksums,
    damage_of,
    listed_files,
    saved_steps,
    set_aside,
    steps_set_aside,
    wait_for_sizes,
    write_file_list,
)
from .ranks import Ranks
from .todays_names import TodaysNames

VISIBLE_WITHIN = 120.0
"""Seconds that a rank waits for a checkpoint that the first rank sees. Network file systems show new files to other
hosts after up to a minute."""


class Checkpoints(CheckpointManager):
    """torchtitan's ``CheckpointManager`` for a run folder. ``interval`` is in steps; ``milestones`` are steps kept for
    ever."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        keep_last: int = 2
        milestones: list[int] = field(default_factory=list)

    def __init__(self, config: Config, **kwargs: Any) -> None:
        if config.async_mode != "disabled":
            raise UserError(f"checkpoint.async_mode {config.async_mode} is not supported; leave it at disabled")
        super().__init__(config, **kwargs)
        self.keep_last = config.keep_last
        self.milestones = frozenset(config.milestones)
        self.ranks = Ranks()
        self.run = RunFolder(Path(self.folder).parent)
        self.newest: int | None = None
        """Step of the checkpoint that this process loaded or saved last."""

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step) or curr_step in self.milestones

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._should_save(curr_step, last_step):
            self._check_finite(curr_step)
        return super()._save(curr_step, last_step)

    def _check_finite(self, step: int) -> None:
        """Raise ``Diverged`` on every rank when a weight or a moment of the optimizer is not finite on any."""
        found = [name for name in self.ranks.gather(_not_finite(self._numbers())) if name is not None]
        if found:
            last = "there is no checkpoint" if self.newest is None else f"the last checkpoint is of step {self.newest}"
            raise Diverged(f"Step {step} is not saved: {found[0]} holds numbers that are not finite; {last}")

    def _numbers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's share of all weights and of what the optimizer remembers of them, by name."""
        # Not the model's parameters, which may be gathered whole at the moment.
        for optimizer in self.states[OPTIMIZER]:
            for group in optimizer.param_groups:
                for name, parameter in zip(group["param_names"], group["params"], strict=True):
                    yield name, parameter
                    for moment, value in optimizer.state.get(parameter, {}).items():
                        if moment != "step":  # a counter, on whichever device
                            yield f"{moment} of {name}", value

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
        self.ranks.by_first(lambda: shutil.rmtree(temporary, ignore_errors=True))
        result = super().dcp_save(state_dict, str(temporary), async_mode, enable_garbage_collection, to_hf)
        # Each rank reads back what it has just written, which its host still has in memory.
        written = self.ranks.together(lambda: checksums(temporary, self._mine(os.listdir(temporary))))
        step = int(final.name.removeprefix("step-"))
        self.ranks.by_first(lambda: self._finish(temporary, step, {k: v for part in written for k, v in part.items()}))
        self.newest = step
        return result

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        dcp.load(state_dict, checkpoint_id=checkpoint_id, planner=TodaysNames())
        if MODEL in self.states:
            # The manager hands over a flat copy of the model's state.
            self.states[MODEL].load_state_dict(state_dict)

    def _finish(self, temporary: Path, step: int, files: dict[str, Listed]) -> None:
        write_file_list(temporary, files)
        final = Path(self._create_checkpoint_id(step))
        try:
            os.replace(temporary, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # This host did not see it when the run was resumed, and so came to this step once more.
            set_aside(self.folder, step)
            os.replace(temporary, final)
        flush_folder(final.parent)
        self.run.note_saved(step)
        self._purge(step)

    def _purge(self, written: int) -> None:
        """Remove what is no longer needed now that the checkpoint of step ``written`` is whole. The one that the run
        was resumed from is among the last whole ones until there are enough newer ones."""
        steps = [step for step in saved_steps(self.folder) if step <= written]
        whole = (step for step in reversed(steps) if damage_of(Path(self._create_checkpoint_id(step))) is None)
        kept = {*islice(whole, self.keep_last), *self.milestones, written}
        for step in steps:
            if step not in kept:
                shutil.rmtree(self._create_checkpoint_id(step), ignore_errors=True)
        for step in steps_set_aside(self.folder):
            if step <= written:
                path = Path(self.folder) / f"damaged-step-{step}"
                shutil.rmtree(path, ignore_errors=True)
                logger.info(f"Removed {path}: the run has come to step {written} without it")

    def _load(self, step: int = -1) -> bool:
        """Load the newest whole checkpoint, the same on every rank; False where the run has to begin.

        Raises:
            UserError: on every rank, when checkpoints have been saved and none is whole, or a rank cannot see the one
                that the first rank has chosen.
        """
        if step != -1:
            return super()._load(step)
        steps = self.ranks.by_first(lambda: saved_steps(self.folder))
        damaged: dict[int, str] = {}
        for candidate in reversed([step for step in steps if step > 0]):
            damage = self._load_if_whole(candidate)
            if damage is None:
                self.newest = candidate
                self.ranks.by_first(lambda: self._take_out_of_the_way(damaged))
                return True
            logger.error(f"{damage}; the checkpoint of step {candidate} is passed over for an earlier one")
            damaged[candidate] = damage
        self.ranks.by_first(lambda: self._refuse_to_begin_anew(damaged))
        if 0 not in steps:
            logger.info("There is no checkpoint: the run begins at step 1")
            return False
        damage = self._load_if_whole(0)
        if damage is not None:
            raise UserError(f"{damage}; make the run folder again with `depth import`")
        self.newest = 0
        return True

    def _load_if_whole(self, step: int) -> str | None:
        """Load the checkpoint of ``step``, or say what is wrong with it. Collective."""
        path = Path(self._create_checkpoint_id(step))
        files, damage = self.ranks.by_first(lambda: listed_files(path))
        if damage is not None:
            return damage
        self.ranks.together(lambda: _wait_until_seen(path, files))
        damages = self.ranks.gather(_damage_within(path, {name: files[name] for name in self._mine(files)}))
        damage = next((damage for damage in damages if damage is not None), None)
        if damage is not None:
            return damage
        if all(listed.crc32 is not None for listed in files.values()):
            super()._load(step)
            return None
        return self._try_to_load(step, path)

    def _try_to_load(self, step: int, path: Path) -> str | None:
        """Load a checkpoint without checksums: whether it is damaged shows in loading it. What of it has been loaded
        by then is replaced by the next one."""
        error: BaseException | None = None
        try:
            super()._load(step)
        except (Exception, CheckpointException) as caught:  # a CheckpointException is no Exception
            error = caught
        kinds = [kind for kind in self.ranks.gather(None if error is None else type(error).__name__) if kind]
        return f"{path} cannot be read ({kinds[0]})" if kinds else None

    def _take_out_of_the_way(self, damaged: dict[int, str]) -> None:
        for step in damaged:
            aside = set_aside(self.folder, step)
            logger.warning(f"The damaged checkpoint of step {step} is now {aside}, until the run has come to that step")

    def _refuse_to_begin_anew(self, damaged: dict[int, str]) -> None:
        """Raise ``UserError`` when the run has been saved later than at step 0."""
        again = f"or move {self.run.path} away to begin again at step 1"
        if damaged:
            raise UserError(
                f"no checkpoint in {self.folder} is whole ({'; '.join(damaged.values())}); nothing was changed: put a "
                f"whole one back and start again, {again}"
            )
        step = self._last_saved()
        if step > 0:
            raise UserError(
                f"{self.run.path} has been trained and saved up to step {step}, and {self.folder} has no checkpoint of "
                f"it any more; nothing was changed: put one back and start again, {again}"
            )

    def _last_saved(self) -> int:
        """The last step that is known to have been saved, whether its checkpoint is still there or not; 0 for none. A
        run that was killed before its first checkpoint has none."""
        status = self.run.readable_status()
        # Folders of earlier versions do not note what was saved.
        ended = status["step"] if status.get("state") in ("stopped", "finished") else 0
        logged = max((record["step"] for record in self.run.metrics()), default=0)
        first = min(self.interval, *self.milestones, logged)
        # A step is logged, saved, and then followed by the next one.
        return max(status.get("saved", 0), ended, first if logged > first else 0)

    def _mine(self, names: Iterable[str]) -> list[str]:
        """The files of a checkpoint that this rank reads: those that it wrote or, with other ranks than then, its share
        of the rest."""
        ranks, rank = dist.get_world_size(), dist.get_rank()
        writers = {name: re.match(r"__(\d+)_", name) for name in names}
        return [name for name, writer in writers.items() if (int(writer[1]) if writer else 0) % ranks == rank]


def _wait_until_seen(checkpoint: Path, files: dict[str, Listed]) -> None:
    try:
        wait_for_sizes(checkpoint, files, VISIBLE_WITHIN)
    except Damage as damage:
        raise UserError(
            f"rank {dist.get_rank()} on {platform.node()} does not see the checkpoint that the first rank sees: "
            f"{damage}, after {VISIBLE_WITHIN:.0f} s; check that {checkpoint} is on a file system that all hosts "
            "share, and start again"
        ) from None


def _damage_within(checkpoint: Path, files: dict[str, Listed]) -> str | None:
    try:
        check_contents(checkpoint, files)
    except Damage as damage:
        return str(damage)
    return None


@torch.no_grad()
def _not_finite(numbers: Iterator[tuple[str, torch.Tensor]]) -> str | None:
    """The first name with a number that is infinite or NaN. Waits for the device once."""
    names, finite = [], []
    for name, tensor in numbers:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        names.append(name)
        finite.append(local.isfinite().all())
    return next((name for name, good in zip(names, torch.stack(finite).tolist(), strict=True) if not good), None)
