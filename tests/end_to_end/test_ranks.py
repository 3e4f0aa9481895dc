"""Training does not depend on the number of processes: losses, gradient norms and weights after 20 steps, in fp32.

The batch of 60 sequences can be split over all layouts here. The 512 rows of the embedding cannot be split evenly over
3, 5 or 6 processes, so that FSDP pads it, and the same goes for most parameters that variants add.

Learning rates are small, the absolute ones of some variants included, so that runs stay near the initial weights. Later
a read may come out near zero, which makes the gradient of its token as large as the next norm's eps allows, and then
even one process differs from itself by 1e-4 when it takes the batch in two passes.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distinct import DISTINCT
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.errors import UserError
from torchtitan_ext.run_folder import RunFolder
from torchtitan_ext.sizes import shape_of
from torchtitan_ext.titan.restore import build, describe, restore

pytestmark = pytest.mark.slow

STEPS = 20
SHAPE = shape_of("debug", 512)


def options(name: str) -> list[str]:
    """The variant, all of whose parameters are to have the run's learning rate."""
    absolute = [group.name for group in VARIANTS[name].trained_groups(SHAPE) if group.lr is not None]
    return ["--model.variant", name, *(word for group in absolute for word in (f"--groups.{group}.lr_factor", "1"))]


RUNS = {name: options(name) for name in DISTINCT}
RUNS |= {"untied": ["--model.tied", "false"]}
STANDARD = ("standard", "untied")
LAYOUTS = {"2": (2, 1), "3": (3, 1), "4": (4, 1), "5": (5, 1), "6": (6, 1), "2x2": (4, 2), "2x3": (6, 2)}
"""Processes, and how many groups of them hold a whole copy of the model each."""
EVERY_VARIANT = ("3", "2x2")
CASES = [(layout, name) for layout in LAYOUTS for name in (RUNS if layout in EVERY_VARIANT else STANDARD)]

TrainMany = Callable[..., dict[str, RunFolder]]


def train(train_many: TrainMany, names: list[str], ranks: int, replicate: int) -> dict[str, RunFolder]:
    short = [
        *("--training.steps", str(STEPS), "--optimizer.warmup_steps", "2", "--training.batch_tokens", "1920"),
        *("--training.micro_batch", str(60 // ranks), "--training.precision", "fp32", "--optimizer.lr", "2e-4"),
        *("--data.seq_len", "32"),
        *("--checkpoint.every", "0", "--heldout.every", "0", "--parallelism.replicate", str(replicate)),
    ]
    return train_many({name: [*short, *RUNS[name]] for name in names}, ranks=ranks)


@pytest.fixture(scope="module")
def alone(train_many: TrainMany) -> dict[str, RunFolder]:
    return train(train_many, list(RUNS), 1, 1)


@pytest.fixture(scope="module")
def trained(train_many: TrainMany) -> dict[str, dict[str, RunFolder]]:
    """The runs of every layout, one launch for each."""
    return {
        layout: train(train_many, [name for of, name in CASES if of == layout], ranks, replicate)
        for layout, (ranks, replicate) in LAYOUTS.items()
    }


def curve(folder: RunFolder, tag: str) -> torch.Tensor:
    return torch.tensor([record[tag] for record in folder.metrics() if tag in record], dtype=torch.float64)


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return {name: weight.double() for name, weight in restore(folder).model.named_parameters()}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_run_is_that_of_one_process(
    layout: str, name: str, alone: dict[str, RunFolder], trained: dict[str, dict[str, RunFolder]]
) -> None:
    one, many = alone[name], trained[layout][name]
    for tag in ("loss_metrics/global_avg_loss", "grad_norm"):
        expected, found = curve(one, tag), curve(many, tag)
        assert len(expected) == len(found) == STEPS
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, msg=lambda text, tag=tag: f"{tag}: {text}")
    model = build(describe(one))
    model.init_states()
    start = {parameter: weight.detach().double() for parameter, weight in model.named_parameters()}
    expected_weights, found_weights = weights(one), weights(many)
    for parameter, weight in expected_weights.items():
        moved = (weight - start[parameter]).norm()
        assert (found_weights[parameter] - weight).norm() <= 1e-3 * moved, parameter


@pytest.mark.parametrize(
    ("layout", "name"), [("3", "standard"), ("2", "standard"), ("3", "untied"), ("2x2", "standard")]
)
def test_what_the_first_version_trained_wrongly_is_refused(
    layout: str, name: str, trained: dict[str, dict[str, RunFolder]], tmp_path: Path
) -> None:
    folder = RunFolder(shutil.copytree(trained[layout][name].path, tmp_path / "run"))
    facts = folder.path / "facts.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "format": 1}))
    if (layout, name) == ("3", "standard"):
        with pytest.raises(UserError, match=r"trained on 3 processes by an older version.* 512 rows"):
            restore(folder)
    else:
        restore(folder)
