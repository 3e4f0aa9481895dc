"""A trained model back from its run folder, whole and in one process: to evaluate it, sample from it or export it.

Everything but the weights comes from ``run.yaml`` and ``facts.json``, so neither torchtitan's trainer nor the data set
is needed, and the number of processes that wrote the checkpoint does not matter.
"""

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.depth.attention import FusedAttention, document_mask
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.errors import UserError
from torchtitan_ext.older import RETIRED_KEYS
from torchtitan_ext.run_file import Run, load_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.sizes import Shape

from .checkpoint_files import Damage, check_contents, damage_of, read_file_list, saved_steps
from .todays_names import TodaysNames, todays_names


@dataclass(frozen=True)
class Description:
    """What a run folder says of its model.

    Attributes:
        run: the resolved run. ``run.data.path`` is the data set, whose folder also holds the tokeniser.
        facts: the run's ``facts.json``.
        shape: its ``vocab_size`` is padded; ``facts["identity"]["data"]["vocab_size"]`` is the tokeniser's.
        architecture: its variant and its attention, with the run's options.
    """

    run: Run
    facts: dict[str, Any]
    shape: Shape
    architecture: Architecture

    @property
    def seq_len(self) -> int:
        """Tokens in a training window."""
        return self.run.data.seq_len

    @property
    def vocab_size(self) -> int:
        """Ids that the tokeniser knows; the model's further ones are padding."""
        return self.facts["identity"]["data"]["vocab_size"]


@dataclass(frozen=True)
class Restored:
    """A trained model in evaluation mode, with fp32 weights, unsharded, without gradients."""

    model: DepthDecoder
    step: int
    description: Description


def describe(folder: RunFolder) -> Description:
    """Read what the model of a run is, without its weights.

    Raises:
        UserError: ``folder`` is no run folder, or one that this version does not read.
    """
    facts = folder.facts()
    run_file = folder.path / "run.yaml"
    if not run_file.exists():
        raise UserError(f"{folder.path} has no run.yaml; it is not a whole run folder")
    try:
        model = dict(facts["identity"]["model"])
        architecture = Architecture.described(model, str(folder.path / "facts.json"))
        shape = Shape(**model)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{folder.path / 'facts.json'} does not describe a model this version knows ({error})"
        ) from error
    return Description(load_run(run_file, retired=RETIRED_KEYS), facts, shape, architecture)


def find_checkpoint(folder: RunFolder, step: int | None = None) -> tuple[int, Path]:
    """The step and the folder of the checkpoint of ``step``, or of the newest one, after checking its files' sizes
    (``restore`` checks what is in them).

    Raises:
        UserError: there is none, or it is damaged; the message names the steps that there are. Or an older version
            trained the run wrongly.
    """
    folder.check_trained_right()
    steps = saved_steps(folder.checkpoint_path)
    if not steps:
        raise UserError(f"{folder.path} has no checkpoint yet; the run has to reach its first one")
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise UserError(f"{folder.path} has no checkpoint of step {chosen}; there are steps {_listed(steps)}")
    path = folder.checkpoint_path / f"step-{chosen}"
    damage = damage_of(path)
    if damage is not None:
        raise UserError(f"the checkpoint of step {chosen} is damaged: {damage}; {_whole_ones(folder, steps)}")
    return chosen, path


def restore(folder: RunFolder, step: int | None = None, device: torch.device | None = None) -> Restored:
    """The model of a run with the weights of ``step``, or of its newest checkpoint, on ``device`` or else on the
    accelerator if there is one.

    Its attention is PyTorch's fused one on every device; a run with ``data.document_mask`` gets its mask from
    ``positions``, as in training. Rotary positions reach ``seq_len``. Not collective: each process that calls it reads
    the whole model.

    Raises:
        UserError: no such checkpoint, a damaged one, or one of another model.
    """
    description = describe(folder)
    step, path = find_checkpoint(folder, step)
    model = build(description)
    _load(model, path)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model.eval().requires_grad_(False)
    return Restored(model.to(device), step, description)


def build(description: Description) -> DepthDecoder:
    """The run's decoder on the CPU, its parameters' memory not yet filled."""
    config = decoder_config(
        description.shape,
        description.architecture.variant,
        description.architecture.attention,
        seq_len=description.seq_len,
        inner_attention=FusedAttention.Config(),
        make_mask=document_mask if description.run.data.document_mask else None,
    )
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=description.seq_len)
    return config.build()


def _load(model: DepthDecoder, path: Path) -> None:
    state = model.state_dict()
    try:
        check_contents(path, read_file_list(path))
    except Damage as damage:
        raise UserError(
            f"{path} cannot be read: {damage}; choose another step, or train on from an earlier one"
        ) from None
    with _readable(path):
        reader = FileSystemReader(path)
        saved = todays_names(reader.read_metadata().state_dict_metadata)
    # A checkpoint may hold weights that are tied under one of their names only.
    stored = {name: tensor for name, tensor in state.items() if name in saved}
    loaded = {tensor.data_ptr() for tensor in stored.values()}
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in loaded]
    if missing:
        raise UserError(
            f"{path} has no weights for {missing[0]} ({len(missing)} are missing); it is a checkpoint of another "
            "model, or of another version: code.txt in the run folder names the one that wrote it"
        )
    with _readable(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(stored, storage_reader=reader, planner=TodaysNames(), no_dist=True)
    # Fused projections are split in a state dict, into tensors of their own.
    model.load_state_dict(state)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        # Damage inside a pickle comes as any kind of exception, and a CheckpointException is none.
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}): its files are damaged, or hold another model; choose "
            "another step, or train on from an earlier one"
        ) from error


def _whole_ones(folder: RunFolder, steps: list[int]) -> str:
    whole = [step for step in steps if damage_of(folder.checkpoint_path / f"step-{step}") is None]
    return f"whole ones are those of steps {_listed(whole)}" if whole else "there is no whole one beside it"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))
