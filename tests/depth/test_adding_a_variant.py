"""The variants that docs/adding-a-variant.md shows are what they say, as they stand there."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.strangers import STRANGERS
from torchtitan_ext.titan.graphs import count_graphs


def layer_of(slow: Any, i: int, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    x = x + slow.attention(i, slow.norm(x, slow.of(i, "attention_norm.weight")), positions)
    return x + slow.feed_forward(i, slow.norm(x, slow.of(i, "ffn_norm.weight")))


def weighted_sums(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    x = slow.embed(tokens)
    kept = [x]
    for i in range(slow.shape.layers):
        kept.append(layer_of(slow, i, x, positions))
        x = torch.einsum("j,jtd->td", slow.of(i, "feed_forward_connection.weights"), torch.stack(kept))
    return slow.logits(x)


def mixed_streams(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    streams = [slow.embed(tokens)] * 4
    for i in range(slow.shape.layers):
        for sublayer, norm in (("attention", "attention_norm"), ("feed_forward", "ffn_norm")):
            reading, writing, mixing = (
                slow.of(i, f"{sublayer}_connection.{name}") for name in ("reading", "writing", "mixing")
            )
            h = slow.norm(sum(reading[s] * streams[s] for s in range(4)), slow.of(i, f"{norm}.weight"))
            y = slow.attention(i, h, positions) if sublayer == "attention" else slow.feed_forward(i, h)
            streams = [sum(mixing[r, s] * streams[s] for s in range(4)) + writing[r] * y for r in range(4)]
    return slow.logits(sum(streams) / 4)


def looped(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    x = slow.embed(tokens)
    for i in (*range(slow.shape.layers), *range(slow.shape.layers)):
        x = layer_of(slow, i, x, positions)
    return slow.logits(x)


WRITTEN_OUT = {"weighted_sums": weighted_sums, "mixed_streams": mixed_streams, "looped": looped}
EVERY = pytest.mark.parametrize("name", list(STRANGERS))


def test_the_page_shows_these_variants() -> None:
    assert list(STRANGERS) == [*WRITTEN_OUT, "growing"]


@pytest.mark.parametrize("name", list(WRITTEN_OUT))
def test_it_computes_what_the_definition_says(checks: Any, name: str) -> None:
    checks.equals_slow(STRANGERS[name], WRITTEN_OUT[name], moved=0.2)


@EVERY
def test_it_is_causal_and_trains_at_any_depth(checks: Any, name: str) -> None:
    checks.is_causal(STRANGERS[name])
    for dtype in (torch.float32, torch.bfloat16):
        checks.trains_finitely(STRANGERS[name], 24, dtype)


@EVERY
def test_counts_are_those_of_the_model(checks: Any, name: str) -> None:
    checks.counts_are_those_of_the_model(STRANGERS[name], ["debug", "10M", "100M"])


def test_a_loop_counts_its_matrix_products(checks: Any) -> None:
    shape = checks.small_shape()
    # PyTorch counts no norms, and no products inside the CPU's fused attention.
    uncounted = shape.layers * (6 * 2 * shape.width + 12 * shape.width * 12)
    assert checks.matrix_flops(STRANGERS["looped"], shape) + uncounted == STRANGERS["looped"].flops_per_token(shape, 12)


@EVERY
def test_it_starts_as_the_standard_model_if_it_says_so_and_else_not(checks: Any, name: str) -> None:
    checks.starts_as_it_says(STRANGERS[name])


@EVERY
@pytest.mark.slow
def test_it_compiles_at_any_depth(checks: Any, name: str) -> None:
    checks.compiles(STRANGERS[name], layers=5, deeper=12)
    assert count_graphs(STRANGERS[name], 4) <= count_graphs(STRANGERS[name], 48) + 2 <= 4
