"""A run folder whose checkpoint of step 0 holds given weights: the model alone, which is what training takes from a
step 0."""

import dataclasses
import warnings
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed.checkpoint as dcp

from data_prep.files import sha256
from eval.export.llama import Weights, from_llama
from eval.export.read import read_weights
from eval.export.whole_folder import whole_folder
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.resolve import ResolvedRun
from torchtitan_ext.run_file import dump_run
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.checkpoints import write_file_list


def write_step_zero(resolved: ResolvedRun, files: list[Path], vocab_size: int) -> None:
    """Make the run's folder, with the Llama weights of ``files`` (safetensors) in its step 0. They have ``vocab_size``
    tokens, which may be less than the run's padded vocabulary.

    Raises:
        UserError: a file is damaged, or its tensors are not those of the run's shape.
    """
    shape = dataclasses.replace(resolved.shape, vocab_size=vocab_size)
    weights = from_llama(read_weights(files), shape, files[0].parent)
    model = initial_model(resolved)
    replace(model, weights)
    final = Path(resolved.run.folder)
    with whole_folder(final) as temporary:
        folder = RunFolder(temporary)
        _save(model, folder.checkpoint_path / "step-0")
        folder.write_run(dump_run(resolved.run))
        folder.append_code(_where_from(files))
        folder.write_facts(resolved.facts())


def initial_model(resolved: ResolvedRun) -> DepthDecoder:
    """The run's decoder on the CPU with the weights that a run of its seed starts from."""
    config = decoder_config(
        resolved.shape,
        resolved.architecture.variant,
        resolved.architecture.attention,
        seq_len=resolved.run.data.seq_len,
        inner_attention=FusedAttention.Config(),
    )
    config.seed = resolved.run.seed
    model = config.build()
    model.init_states()
    return model


def replace(model: DepthDecoder, weights: Weights) -> None:
    """Put ``weights``, by the model's own names, in place of its initial ones. What they lack stays: what a variant
    or an attention adds, and the rows of the vocabulary's padding."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in weights.items():
        state[name][: tensor.shape[0]] = tensor
    model.load_state_dict(state)


def _save(model: DepthDecoder, path: Path) -> None:
    path.parent.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(model.state_dict(), checkpoint_id=path, no_dist=True)
    write_file_list(path)


def _where_from(files: list[Path]) -> str:
    lines = [f"imported  {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, the weights of step 0"]
    lines += [f"weights   {file.absolute()} (SHA-256 {sha256(file)})" for file in files]
    return "\n".join(lines) + "\n\n"
