"""Parallelism, activation checkpointing, compilation and precision change how a run computes, not what it learns."""

from collections.abc import Callable

import pytest

from torchtitan_ext.run_folder import RunFolder

pytestmark = pytest.mark.slow

STEPS = 6
SHORT = [
    "--training.steps",
    str(STEPS),
    "--checkpoint.every",
    "0",
    "--heldout.every",
    "0",
    "--optimizer.warmup_steps",
    "1",
]

MODES = {
    "eager": [],
    "selective": ["--training.activation_checkpoint", "selective"],
    "full": ["--training.activation_checkpoint", "full"],
    "compiled": ["--training.compile"],
    "compiled_selective": ["--training.compile", "--training.activation_checkpoint", "selective"],
    "compiled_full": ["--training.compile", "--training.activation_checkpoint", "full"],
    "one_pass": ["--training.micro_batch", "4"],
    "resharded": ["--parallelism.reshard_after_forward", "always"],
    "replicated": ["--parallelism.replicate", "2"],
    "deterministic": ["--training.deterministic"],
    "bf16": ["--training.precision", "bf16"],
    "long": ["--data.seq_len", "512", "--training.batch_tokens", "4096"],
    "documents": ["--data.seq_len", "512", "--training.batch_tokens", "4096", "--data.document_mask"],
}
EXACT = ("selective", "full", "deterministic")
"""These run the same operations in the same order."""
OTHER = ("eager", "bf16", "long", "documents")
"""These are compared one by one."""


def curve(folder: RunFolder, name: str = "loss_metrics/global_avg_loss") -> list[float]:
    return [record[name] for record in folder.metrics() if name in record]


@pytest.fixture(scope="module")
def runs(train_many: Callable[..., dict[str, RunFolder]]) -> dict[str, RunFolder]:
    return train_many({name: [*SHORT, *overrides] for name, overrides in MODES.items()})


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_falls(mode: str, runs: dict[str, RunFolder]) -> None:
    losses = curve(runs[mode])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("mode", EXACT)
def test_recomputing_activations_changes_nothing(mode: str, runs: dict[str, RunFolder]) -> None:
    assert curve(runs[mode]) == curve(runs["eager"])
    assert curve(runs[mode], "grad_norm") == curve(runs["eager"], "grad_norm")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in (*EXACT, *OTHER)])
def test_other_modes_differ_by_rounding(mode: str, runs: dict[str, RunFolder]) -> None:
    assert curve(runs[mode]) == pytest.approx(curve(runs["eager"]), abs=1e-4)


def test_bf16_is_near_and_not_fp32(runs: dict[str, RunFolder]) -> None:
    """bf16 keeps 8 bits: a loss near 6 is off by about 6 · 2⁻⁹ at the start, and not by nothing."""
    bf16, fp32 = curve(runs["bf16"]), curve(runs["eager"])
    assert bf16 != fp32
    assert bf16 == pytest.approx(fp32, abs=0.05)


def test_document_masks_change_the_loss(runs: dict[str, RunFolder]) -> None:
    assert curve(runs["documents"])[0] != pytest.approx(curve(runs["long"])[0], abs=1e-6)


def test_four_ranks_shard_and_replicate(
    train_many: Callable[..., dict[str, RunFolder]], runs: dict[str, RunFolder]
) -> None:
    modes = {"fsdp": [], "hsdp": ["--parallelism.replicate", "2", "--parallelism.shard", "2"]}
    four = train_many({name: [*SHORT, "--training.micro_batch", "1", *more] for name, more in modes.items()}, ranks=4)
    for name in modes:
        assert curve(four[name]) == pytest.approx(curve(runs["eager"]), abs=1e-4), name
