"""The command on real models in real processes, its counts against independent ones."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_ext.bench import command
from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.registry import VARIANTS
from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import Shape, shape_of

LAYERS, WIDTH, VOCABULARY = 3, 64, 512
SEQUENCES, SEQ_LEN = 2, 64
TOKENS = SEQUENCES * SEQ_LEN
SCALARS = 128
"""Bytes: the loss, its divisor and the like, which the by-hand counts leave out."""

MODEL = [
    *("--size", "debug", f"--model.layers={LAYERS}", "--vocab-size", str(VOCABULARY)),
    *("--seq-len", str(SEQ_LEN), "--micro-batch", str(SEQUENCES)),
]


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_arguments(parser)
    args, args.overrides = parser.parse_known_args(arguments)
    return command.run(args)


def shape() -> Shape:
    return shape_of("debug", VOCABULARY, layers=LAYERS)


def saved_by_autograd(variant: str) -> int:
    """Bytes that autograd's own hooks see saved by the bare model and its loss, each storage once."""
    config = decoder_config(shape(), VARIANTS[variant], seq_len=SEQ_LEN, inner_attention=FusedAttention.Config())
    model = config.build()
    model.init_states()
    tokens = torch.randint(VOCABULARY, (SEQUENCES, SEQ_LEN))
    given = {t.untyped_storage()._cdata for t in (tokens, *model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("bench") / "out"
    timing = ["--turns", "2", "--steps-per-turn", "3"]
    assert bench(*MODEL, "--variants", "control_block", *timing, "--out", str(out)) == 0
    found = json.loads((out / "bench.json").read_text())
    table = (out / "bench.md").read_text()
    for model in found["models"]:
        assert f"| {model['label']} | {model['speed']['tokens_per_second']:,.0f} | " in table
    return found


@pytest.mark.slow
def test_models_are_what_the_registry_says(record: dict[str, Any]) -> None:
    assert [model["label"] for model in record["models"]] == ["standard", "control_block"]
    for model in record["models"]:
        variant = VARIANTS[model["label"]]
        assert model["parameters"] == shape().parameters() + variant.parameters(shape())
        flops = shape().flops_per_token(SEQ_LEN) + variant.flops_per_token(shape(), SEQ_LEN)
        assert model["flops_per_token"] == flops
        assert model["graphs"] is None, "nothing was compiled"


@pytest.mark.slow
def test_bytes_saved_for_backward_are_those_that_autograd_saves(record: dict[str, Any]) -> None:
    standard, control = record["models"]
    for model in (standard, control):
        assert model["saved_bytes"] == pytest.approx(saved_by_autograd(model["label"]), abs=SCALARS)
    assert control["saved_ratio"] == control["saved_bytes"] / standard["saved_bytes"] > 1


@pytest.mark.slow
def test_speed_follows_from_the_turns(record: dict[str, Any]) -> None:
    assert (record["turns"], record["steps_per_turn"]) == (2, 3)
    ratios = []
    for turn in range(2):
        one, other = (model["turns"][turn] for model in record["models"])
        assert set(one) == {"data", "forward", "loss", "backward", "optimizer"}
        assert all(seconds > 0 for seconds in [*one.values(), *other.values()])
        ratios.append(sum(one.values()) / sum(other.values()))
    # With two turns the median is their mean.
    assert record["models"][1]["speed"]["ratio"][1] == pytest.approx(sum(ratios) / 2)
    rates = [3 * TOKENS / sum(turn.values()) for turn in record["models"][0]["turns"]]
    assert record["models"][0]["speed"]["tokens_per_second"] == pytest.approx(sum(rates) / 2)


@pytest.mark.slow
def test_full_checkpointing_saves_what_can_be_counted_by_hand(tmp_path: Path) -> None:
    options = ["--variants", "standard", "--checkpoint", "full", "--turns", "0"]
    assert bench(*MODEL, *options, "--out", str(tmp_path)) == 0
    (standard,) = json.loads((tmp_path / "bench.json").read_text())["models"]
    activation = TOKENS * WIDTH * 4
    by_hand = (
        LAYERS * activation  # each layer's input
        + LAYERS * torch.get_rng_state().nbytes  # and the state of the random numbers before it
        + 3 * activation  # the final norm's input, that divided by its root mean square, and the output
        + TOKENS * 4  # its inverse root mean squares
        + TOKENS * VOCABULARY * 4  # the log-probabilities
    )
    assert standard["saved_bytes"] == pytest.approx(by_hand, abs=SCALARS)
    assert standard["speed"] is None, "nothing was timed"
    # Weights, gradients and two moments of AdamW in fp32, and that on top.
    assert standard["peak_bytes"] > 4 * 4 * standard["parameters"] + standard["saved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["50"], "50 is no run file"),
        (["--turns", "-1"], "--turns is -1; it must be 0 or more"),
        (["--steps-per-turn", "0"], "--steps-per-turn is 0; it must be 1 or more"),
        (["--checkpoint", "ful"], "activation_checkpoint 'ful' is unknown; did you mean 'full'"),
        (["--operation", "depth_read", "--variants", "moda"], "--operation measures one operation, without a model"),
        (["--operation", "depth_read", "--size", "10M"], "--operation measures one operation, without a model"),
        (["--operation", "depth_reed"], "did you mean 'depth_read'"),
        (["--operation", "depth_read", "--key-width", "0"], "--key-width is 0; it must be from 1 to the width, 1536"),
        (["--operation", "depth_read", "--dtype", "float16"], "--dtype float16 is not measured"),
    ],
)
def test_mistakes_are_found_before_anything_is_started(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        bench(*arguments, "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
