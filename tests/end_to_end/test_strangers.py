"""The variants of docs/adding-a-variant.md train on several ranks, compiled, checkpointed, in bf16, and are resumed."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.strangers import STRANGERS
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.titan.restore import describe, restore

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _known() -> Iterator[None]:
    """What reads the run folders knows these variants by name too."""
    VARIANTS.update(STRANGERS)
    yield
    for name in STRANGERS:
        del VARIANTS[name]


STEPS, HALF = 4, 2
WAYS = {
    "plain": [],
    "compiled": ["--training.compile", "true", "--training.activation_checkpoint", "selective"],
    "bf16": ["--training.precision", "bf16", "--training.activation_checkpoint", "selective"],
}
NAMES = [f"{name} {way}" for way in WAYS for name in STRANGERS]


def options(name: str) -> list[str]:
    variant, _, way = name.partition(" ")
    return [
        *("--model.variant", variant, "--model.width", "32", "--training.steps", str(STEPS)),
        *("--data.document_mask", "true", "--checkpoint.every", str(HALF), "--heldout.every", str(HALF)),
        *("--optimizer.warmup_steps", "1", "--logging.depth_every", str(HALF), "--training.batch_tokens", "768"),
        *WAYS[way],
    ]


def curve(folder: RunFolder, name: str = "loss_metrics/global_avg_loss") -> list[float]:
    return [record[name] for record in folder.metrics() if name in record]


@pytest.fixture(scope="module")
def two(train_many: Callable[..., dict[str, RunFolder]]) -> dict[str, RunFolder]:
    return train_many({name: options(name) for name in NAMES}, strangers=True)


@pytest.fixture(scope="module")
def three(train_many: Callable[..., dict[str, RunFolder]], two: dict[str, RunFolder]) -> dict[str, RunFolder]:
    """The second half once more on three ranks, recomputing whole layers, from the checkpoint that two have written."""

    more = ("--training.activation_checkpoint", "full")

    def copy(name: str, folder: Path) -> None:
        shutil.copytree(two[name].path, folder)
        shutil.rmtree(folder / "checkpoint" / f"step-{STEPS}")

    eager = [name for name in NAMES if not name.endswith("compiled")]
    return train_many({name: [*options(name), *more] for name in eager}, ranks=3, prepare=copy, strangers=True)


@pytest.mark.parametrize("variant", STRANGERS)
def test_compiled_and_checkpointed_it_is_what_it_is_eagerly(variant: str, two: dict[str, RunFolder]) -> None:
    losses = curve(two[f"{variant} plain"])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.05
    assert curve(two[f"{variant} compiled"]) == pytest.approx(losses, abs=1e-4)
    assert curve(two[f"{variant} bf16"]) == pytest.approx(losses, abs=0.05)


@pytest.mark.parametrize("variant", STRANGERS)
def test_it_goes_on_on_three_ranks(variant: str, two: dict[str, RunFolder], three: dict[str, RunFolder]) -> None:
    plain = f"{variant} plain"
    for name in ("loss_metrics/global_avg_loss", "heldout/loss"):
        assert curve(three[plain], name) == pytest.approx(curve(two[plain], name), abs=1e-4)
    assert curve(three[f"{variant} bf16"]) == pytest.approx(curve(two[f"{variant} bf16"]), abs=0.02)


def test_a_schedule_that_changes_is_saved_counted_and_goes_on(
    two: dict[str, RunFolder], three: dict[str, RunFolder]
) -> None:
    """The layers once in steps 1 and 2, twice from then on, also in the run that goes on from the checkpoint."""
    for folder in (two["growing plain"], two["growing compiled"], three["growing plain"]):
        facts = folder.facts()
        shape = describe(folder).shape
        more = shape.layers * shape.layer_flops_per_token(64)
        flops = [768 * facts["flops_per_token"] * step + 768 * more * max(0, step - HALF) for step in (1, 2, 3, 4)]
        assert curve(folder, "progress/train_flops") == flops
        looped = [record for record in folder.metrics() if "depth/feed_forward_output_rms/00" in record]
        twice = f"depth/feed_forward_output_rms/{2 * shape.layers - 1:02}"
        assert [twice in record for record in looped] == [True, True], "after the steps that have changed it"
        assert restore(folder).model.changing_schedule.state.tolist() == [1, 2, 2]
        assert restore(two["growing plain"], HALF).model.changing_schedule.state.tolist() == [1, 2, 0]


def test_each_application_of_a_layer_is_looked_into(two: dict[str, RunFolder]) -> None:
    record = next(record for record in two["looped plain"].metrics() if "depth/gradient_norm/00" in record)
    layers = two["looped plain"].facts()["identity"]["model"]["layers"]
    assert f"depth/feed_forward_output_rms/{2 * layers - 1:02}" in record
    assert f"depth/gradient_norm/{layers:02}" not in record
