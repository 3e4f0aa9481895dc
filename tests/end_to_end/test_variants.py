"""Every variant trains as the baseline does: sharded, checkpointed, compiled, resumed on other ranks, looked into.

Here is one variant per kind of depth state, with attentions beside some, and a rotation of the others.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distinct import DISTINCT
from tests.rotation import rotated
from torchtitan_ext.run_folder import RunFolder

pytestmark = pytest.mark.slow

STEPS, HALF = 6, 3
MODELS = {name: ["--model.variant", name] for name in DISTINCT} | {
    f"{variant}+{attention}": ["--model.variant", variant, "--model.attention", attention]
    for variant, attention in (("standard", "gate_headwise"), ("m_gate_kv", "gate_elementwise"), ("moda", "qk_norm"))
}
MODELS["attnres_block+gpt2"] = ["--model.variant", "attnres_block", "--model.block", "gpt2"]
MODELS["value_residual+nanogpt"] = ["--model.variant", "value_residual", "--model.block", "nanogpt"]
ONE_PER_KIND = [
    *("standard", "attnres_block", "block_input_dep_query", "m_gate_kv", "moda", "value_residual"),
    *("standard+gate_headwise", "m_gate_kv+gate_elementwise", "attnres_block+gpt2"),
]
"""Of each family, and of each way to be compiled, one: compiling takes most of the time here."""
NAMES = [*ONE_PER_KIND, *rotated([name for name in MODELS if name not in ONE_PER_KIND], 6)]

TrainMany = Callable[..., dict[str, RunFolder]]


def options(variant: str, *more: str) -> list[str]:
    """Two passes per step on two ranks, documents kept apart, a checkpoint and a look inside half-way."""
    return [
        *(*MODELS[variant], "--training.steps", str(STEPS), "--optimizer.warmup_steps", "1"),
        *("--data.document_mask", "true", "--checkpoint.every", str(HALF), "--heldout.every", str(HALF)),
        *("--logging.depth_every", str(HALF), *more),
    ]


def curve(folder: RunFolder, name: str = "loss_metrics/global_avg_loss") -> list[float]:
    return [record[name] for record in folder.metrics() if name in record]


@pytest.fixture(scope="module")
def runs(train_many: TrainMany) -> dict[str, RunFolder]:
    return train_many({name: options(name) for name in NAMES})


@pytest.fixture(scope="module")
def resumed(train_many: TrainMany, runs: dict[str, RunFolder]) -> dict[str, RunFolder]:
    """The second half of every run once more from its checkpoint half-way, on one rank, recomputing activations."""

    more = ("--training.activation_checkpoint", "full")

    def copy(name: str, folder: Path) -> None:
        shutil.copytree(runs[name].path, folder)
        shutil.rmtree(folder / "checkpoint" / f"step-{STEPS}")

    return train_many({name: options(name, *more) for name in NAMES}, ranks=1, prepare=copy)


@pytest.fixture(scope="module")
def compiled(train_many: TrainMany) -> dict[str, RunFolder]:
    more = ("--training.compile", "true", "--training.activation_checkpoint", "selective")
    return train_many({name: options(name, *more) for name in ONE_PER_KIND})


@pytest.fixture(scope="module")
def replicated(train_many: TrainMany) -> dict[str, RunFolder]:
    more = ("--training.micro_batch", "1", "--parallelism.replicate", "2")
    more = (*more, "--training.activation_checkpoint", "selective")
    return train_many({name: options(name, *more) for name in ONE_PER_KIND}, ranks=4)


@pytest.fixture(scope="module")
def bf16(train_many: TrainMany) -> dict[str, RunFolder]:
    return train_many({name: options(name, "--training.precision", "bf16") for name in ONE_PER_KIND})


@pytest.mark.parametrize("variant", NAMES)
def test_the_loss_falls(variant: str, runs: dict[str, RunFolder]) -> None:
    losses = curve(runs[variant])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1
    first, last = curve(runs[variant], "heldout/loss")
    assert last < first


@pytest.mark.parametrize("variant", NAMES)
def test_resuming_on_one_rank_with_full_checkpointing_goes_on_as_on_two_without(
    variant: str, runs: dict[str, RunFolder], resumed: dict[str, RunFolder]
) -> None:
    for name in ("loss_metrics/global_avg_loss", "grad_norm", "heldout/loss"):
        assert curve(resumed[variant], name) == pytest.approx(curve(runs[variant], name), abs=1e-4), name


@pytest.mark.parametrize("variant", ONE_PER_KIND)
def test_bf16_is_near_fp32(variant: str, runs: dict[str, RunFolder], bf16: dict[str, RunFolder]) -> None:
    assert curve(bf16[variant]) == pytest.approx(curve(runs[variant]), abs=0.05)
    assert curve(bf16[variant]) != curve(runs[variant])


@pytest.mark.parametrize("variant", ONE_PER_KIND)
def test_compiled_and_selectively_checkpointed_equals_eager(
    variant: str, runs: dict[str, RunFolder], compiled: dict[str, RunFolder]
) -> None:
    assert curve(compiled[variant]) == pytest.approx(curve(runs[variant]), abs=1e-4)


@pytest.mark.parametrize("variant", ONE_PER_KIND)
def test_four_ranks_in_two_groups_with_selective_checkpointing_equal_two(
    variant: str, runs: dict[str, RunFolder], replicated: dict[str, RunFolder]
) -> None:
    assert curve(replicated[variant]) == pytest.approx(curve(runs[variant]), abs=1e-4)


@pytest.mark.parametrize("variant", NAMES)
def test_the_counts_are_in_the_facts(variant: str, runs: dict[str, RunFolder]) -> None:
    facts = runs[variant].facts()
    standard = runs["standard"].facts()
    assert facts["parameters"] >= standard["parameters"]
    last = [record for record in runs[variant].metrics() if "grad_norm" in record][-1]
    assert last["progress/train_flops"] == facts["flops_per_token"] * STEPS * 512


def looks(folder: RunFolder) -> list[dict[str, Any]]:
    return [record for record in folder.metrics() if any(name.startswith("depth/") for name in record)]


@pytest.mark.parametrize("variant", NAMES)
def test_looking_inside(variant: str, runs: dict[str, RunFolder]) -> None:
    found = looks(runs[variant])
    assert [record["step"] for record in found] == [HALF, STEPS]
    layers = runs[variant].facts()["identity"]["model"]["layers"]
    for record in found:
        for name in ("attention_output_rms", "feed_forward_output_rms", "gradient_norm"):
            values = [record[f"depth/{name}/{layer:02}"] for layer in range(layers)]
            assert all(value > 0 for value in values), name


@pytest.mark.parametrize("variant", [name for name in NAMES if "attnres" in name or "block" in name])
def test_depth_attention_maps_are_weights(variant: str, runs: dict[str, RunFolder]) -> None:
    for record in looks(runs[variant]):
        rows = record["depth/attention_map"]
        assert all(sum(row) == pytest.approx(1.0, abs=1e-5) for row in rows)
        entropies = [value for name, value in record.items() if name.startswith("depth/attention_entropy/")]
        assert len(entropies) == len(rows)
        assert all(value > 0 for value in entropies)


def test_looking_inside_works_compiled(runs: dict[str, RunFolder], compiled: dict[str, RunFolder]) -> None:
    for variant in ONE_PER_KIND:
        for eager, graphs in zip(looks(runs[variant]), looks(compiled[variant]), strict=True):
            assert eager.keys() == graphs.keys()
            for name in eager:
                if name.endswith("_rms/00"):
                    assert graphs[name] == pytest.approx(eager[name], rel=1e-3)


@pytest.mark.parametrize("variant", [name for name in NAMES if name.startswith("m_gate")])
def test_gates_are_open_by_half_at_the_start(variant: str, runs: dict[str, RunFolder]) -> None:
    """Biases and small weights start near zero, where the sigmoid is one half."""
    record = looks(runs[variant])[0]
    openness = [value for name, value in record.items() if name.startswith("depth/gate_openness/")]
    assert openness
    assert openness == pytest.approx([0.5] * len(openness), abs=0.1)


def test_moda_gives_depth_keys_their_share(runs: dict[str, RunFolder]) -> None:
    record = looks(runs["moda"])[0]
    shares = [value for name, value in record.items() if name.startswith("depth/depth_key_mass/")]
    assert len(shares) == runs["moda"].facts()["identity"]["model"]["layers"] - 1, "the first layer has no depth keys"
    assert all(0 < share < 1 for share in shares)
