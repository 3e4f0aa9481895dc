"""A checkpoint reduced to its weights: what evaluating, exporting and looking at a model need, a third of its size."""

import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from torchtitan_ext.run_folder import RunFolder

from .checkpoints import write_file_list
from .restore import find_checkpoint, restore
from .todays_names import todays_names


def check_whole(folder: RunFolder, steps: Iterable[int]) -> None:
    """Raise ``UserError`` where a checkpoint of ``steps`` is damaged. One that `keep_weights` was about to replace when
    it was interrupted is put back."""
    for step in steps:
        final = _final(folder, step)
        if not final.exists() and _old(final).exists():
            _old(final).rename(final)
        find_checkpoint(folder, step)


def keep_weights(folder: RunFolder, step: int) -> None:
    """Replace the checkpoint of ``step`` by one that has its weights alone, in fp32 as before.

    The old one is deleted only when the new one is whole. Needs the memory of the weights, on the CPU.
    """
    check_whole(folder, [step])
    final = _final(folder, step)
    temporary, old = final.with_name(f".{final.name}.weights"), _old(final)
    state = restore(folder, step, torch.device("cpu")).model.state_dict()
    # Of tied weights one is enough to restore them, the one that training saved.
    saved = todays_names(FileSystemReader(final).read_metadata().state_dict_metadata)
    named = {tensor.data_ptr(): name for name, tensor in state.items() if name in saved}
    weights = {name: state[name] for name in named.values()}
    shutil.rmtree(temporary, ignore_errors=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(weights, checkpoint_id=temporary, no_dist=True)
    write_file_list(temporary)
    shutil.rmtree(old, ignore_errors=True)
    final.rename(old)
    temporary.rename(final)
    shutil.rmtree(old)


def _final(folder: RunFolder, step: int) -> Path:
    return folder.checkpoint_path / f"step-{step}"


def _old(final: Path) -> Path:
    """Where a checkpoint is while another takes its place: no reader takes it for one."""
    return final.with_name(f".{final.name}.full")
