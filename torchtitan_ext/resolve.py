"""From a run file to a run with nothing left open: shape, variant, recipe, batch and length filled in and checked
together."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from data_prep.dataset import TokenDataset
from data_prep.windows import Windows
from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.depth.attentions import ATTENTIONS
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.errors import UserError
from torchtitan_ext.parameter_groups import Group, TrainedGroup, trained_groups, with_settings
from torchtitan_ext.recipe import compute_optimal_tokens, recipe_for
from torchtitan_ext.run_file import Run, load_run
from torchtitan_ext.sizes import SIZES, Shape, padded_vocab, shape_of

KNOWN_NAMES: dict[str, Collection[str]] = {
    "model.size": SIZES,
    "model.variant": VARIANTS,
    "model.attention": ATTENTIONS,
}
"""Names that a run file may use, for ``load_run``."""

MICRO_BATCH_TOKENS = 8192
"""An open ``training.micro_batch`` is the largest that splits the batch evenly and has no more tokens than this."""


@dataclass(frozen=True)
class ResolvedRun:
    """A run with every open value filled in. ``run`` is itself a complete run file again."""

    run: Run
    shape: Shape
    architecture: Architecture
    dataset: TokenDataset
    ranks: int

    @property
    def steps(self) -> int:
        assert self.run.training.steps is not None
        return self.run.training.steps

    @property
    def batch_tokens(self) -> int:
        """Tokens per optimizer step over all ranks."""
        assert self.run.training.batch_tokens is not None
        return self.run.training.batch_tokens

    @property
    def parameters(self) -> int:
        return self.architecture.parameters(self.shape)

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward."""
        return self.architecture.flops_per_token(self.shape, self.run.data.seq_len)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The parameter groups of variant and attention with the settings of the run."""
        return _groups(self.run, self.architecture, self.shape)

    def parameter_groups(self) -> tuple[TrainedGroup, ...]:
        """All parameters by how they are trained; a parameter belongs to the first group whose pattern it matches."""
        optimizer, undecayed = self.run.optimizer, self.shape.undecayed_parameters()
        assert optimizer.lr is not None
        return trained_groups(
            {"norms and embeddings": undecayed, "matrices": self.shape.parameters() - undecayed},
            self.groups,
            tied=self.shape.tied,
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
        )

    def identity(self) -> dict[str, Any]:
        """What a run folder's run is; a run that differs in any of it is another run and cannot continue there."""
        run, machine_options = self.run, self.architecture.variant.machine_options
        return {
            "model": {
                **self.shape.described(),
                "variant": run.model.variant,
                **{f"depth.{k}": v for k, v in run.depth.items() if k not in machine_options},
                # Left out by default, as in run folders from before there was a choice.
                **({} if run.model.attention == "standard" else {"attention": run.model.attention}),
                **{f"attention.{k}": v for k, v in run.attention.items()},
            },
            "seed": run.seed,
            "data": {
                "fingerprint": self.dataset.fingerprint,
                "heldout_fingerprint": self.dataset.heldout_fingerprint,
                "vocab_size": self.dataset.vocab_size,
                "seq_len": run.data.seq_len,
                "seed": run.data.seed,
                "document_mask": run.data.document_mask,
            },
            "batch_tokens": self.batch_tokens,
        }

    def facts(self) -> dict[str, Any]:
        """What follows from the run, for the tools that read run folders."""
        return {
            "name": self.run.name,
            "size": self.run.model.size,
            "variant": self.run.model.variant,
            "attention": self.run.model.attention,
            "identity": self.identity(),
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "steps": self.steps,
        }


def load_resolved(path: str, overrides: list[str]) -> ResolvedRun:
    """Read a run file with command-line ``overrides`` and resolve it for the ranks of this launch (``WORLD_SIZE``).

    Raises ``UserError`` for anything that does not fit, before anything is allocated.
    """
    return resolve(load_run(path, overrides, known=KNOWN_NAMES), ranks=int(os.environ.get("WORLD_SIZE", "1")))


def resolve(run: Run, ranks: int, planned: TokenDataset | None = None) -> ResolvedRun:
    """Fill in what ``run`` leaves open for a launch on ``ranks`` processes. Raises ``UserError``.

    ``planned`` stands for a data set that is not prepared yet: its vocabulary counts, its (missing) tokens do not.
    """
    dataset = TokenDataset.open(run.data.path) if planned is None else planned
    model = run.model
    shape = shape_of(
        model.size,
        padded_vocab(dataset.vocab_size),
        layers=model.layers,
        width=model.width,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn_width=model.ffn_width,
        tied=model.tied,
        block=model.block,
        seq_len=run.data.seq_len,
        where=run.origin("model.size"),
    )
    architecture = architecture_of(run)
    architecture.check(shape)
    _groups(run, architecture, shape)  # a mistake in them is found here

    budget = run.training.tokens
    if run.training.tokens_per_parameter is not None:
        # Of the standard model's parameters, so that every variant sees the same data.
        budget = compute_optimal_tokens(shape, run.training.tokens_per_parameter)
    recipe = recipe_for(
        shape,
        seq_len=run.data.seq_len,
        batch_tokens=run.training.batch_tokens,
        total_tokens=budget,
        steps=run.training.steps,
        where=run.origin("training.batch_tokens"),
    )
    optimizer = run.optimizer
    filled = run.model_copy(
        update={
            "training": run.training.model_copy(
                update={
                    "steps": recipe.steps,
                    "tokens": None,
                    "tokens_per_parameter": None,
                    "batch_tokens": recipe.batch_tokens,
                    "micro_batch": _micro_batch(run, recipe.batch_tokens // run.data.seq_len, ranks),
                }
            ),
            "optimizer": optimizer.model_copy(
                update={
                    "lr": optimizer.lr or recipe.lr,
                    "beta2": recipe.beta2 if optimizer.beta2 is None else optimizer.beta2,
                    "warmup_steps": recipe.warmup_steps if optimizer.warmup_steps is None else optimizer.warmup_steps,
                    "decay_fraction": _decay_fraction(run, recipe.decay_fraction),
                }
            ),
        }
    )
    _check_parallelism(run, ranks)
    if planned is None:
        _check_data(run, dataset, recipe.batch_tokens)
    return ResolvedRun(filled, shape, architecture, dataset, ranks)


def architecture_of(run: Run) -> Architecture:
    """The variant and the attention that ``run`` names, with their options. Raises ``UserError``."""
    return Architecture.named(run.model.variant, run.depth, run.model.attention, run.attention, run.origin)


def _groups(run: Run, architecture: Architecture, shape: Shape) -> tuple[Group, ...]:
    return with_settings(architecture.trained_groups(shape), run.groups, run.origin)


def planned_dataset(run: Run, vocab_size: int | None) -> TokenDataset | None:
    """What stands for the data set of ``run`` in ``resolve`` when only its vocabulary is known; None without one."""
    return None if vocab_size is None else TokenDataset.unprepared(run.data.path, vocab_size)


def _decay_fraction(run: Run, recommended: float) -> float | None:
    if run.optimizer.schedule != "wsd" or run.optimizer.decay_fraction is not None:
        return run.optimizer.decay_fraction
    return recommended


def _micro_batch(run: Run, sequences: int, ranks: int) -> int:
    where = run.origin("training.batch_tokens")
    if sequences % ranks:
        raise UserError(
            f"{where}: the batch of {sequences} sequences ({sequences * run.data.seq_len} tokens) cannot be split over "
            f"{ranks} ranks; use {max(1, sequences // ranks) * ranks * run.data.seq_len} tokens, or other ranks"
        )
    share = sequences // ranks
    asked = run.training.micro_batch
    if asked is None:
        most = max(1, MICRO_BATCH_TOKENS // run.data.seq_len)
        return max(size for size in range(1, min(share, most) + 1) if share % size == 0)
    if share % asked:
        fitting = max(size for size in range(1, share + 1) if share % size == 0 and size <= asked)
        raise UserError(
            f"{run.origin('training.micro_batch')}: training.micro_batch {asked} does not divide the {share} "
            f"sequences of each of {ranks} ranks; use {fitting}"
        )
    return asked


def _check_parallelism(run: Run, ranks: int) -> None:
    replicate, shard = run.parallelism.replicate, run.parallelism.shard
    if ranks % replicate or (shard != -1 and replicate * shard != ranks):
        raise UserError(
            f"{run.origin('parallelism.replicate')}: parallelism.replicate {replicate} × parallelism.shard {shard} "
            f"does not give {ranks} ranks; leave parallelism.shard at -1, or start {replicate * max(shard, 1)} ranks"
        )


def _check_data(run: Run, dataset: TokenDataset, batch_tokens: int) -> None:
    Windows(dataset.split("train"), run.data.seq_len, batch=batch_tokens // run.data.seq_len)
    if run.heldout.every or run.logging.depth_every:
        Windows(dataset.split("heldout"), run.data.seq_len)
