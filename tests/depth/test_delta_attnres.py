"""Delta attention residuals against what the published code and the paper say, written out for one sequence in fp64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchtitan_ext.depth.attention_over_depth_named import NAMED
from torchtitan_ext.depth.depth_plan import Place

KEY_EPS = 1e-6


class Reads:
    """x + Σ softmax(⟨q, RMSNorm(s) ⊙ γ⟩) s, read after read, with the model's queries and gains in order."""

    def __init__(self, slow: Any) -> None:
        self.learned = list(zip(slow["stream.queries"], slow["stream.gains"], strict=True))
        self.used = 0

    def __call__(self, x: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
        if len(sources) < 2:  # nothing to choose from: all weight is on the one there is
            return sum(sources, x)
        query, gain = self.learned[self.used]
        self.used += 1
        logits = []
        for source in sources:
            key = source / (source.square().mean(-1, keepdim=True) + KEY_EPS).sqrt() * gain
            logits.append(key @ query)
        weights = torch.stack(logits).softmax(0)
        return x + sum(weight[:, None] * source for weight, source in zip(weights, sources, strict=True))


def delta_block(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Mode delta_block of the authors' code at its default of four blocks: at a block's first layer, between its
    attention and its feed-forward, what attention found there and the last entry taken from it becomes an entry."""
    layers_per_block = -(-slow.shape.layers // 4)
    x, entries, read = slow.embed(tokens), [], Reads(slow)
    for i in range(slow.shape.layers):
        h = read(x, entries)
        a = slow.attention(i, slow.norm(h, slow.of(i, "attention_norm.weight")), positions)
        if i % layers_per_block == 0:
            entries = [*entries, x - entries[-1] if entries else x]
        x = x + a
        h = read(x, entries)
        x = x + slow.feed_forward(i, slow.norm(h, slow.of(i, "ffn_norm.weight")))
    assert read.used == len(read.learned)
    return slow.logits(x)


def block_deltas(slow: Any, tokens: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """The paper's Delta Block: the embedding, and what each finished block has added."""
    layers_per_block = -(-slow.shape.layers // 4)
    x = start = slow.embed(tokens)
    deltas, read = [x], Reads(slow)
    for i in range(slow.shape.layers):
        h = read(x, deltas) if i else x
        x = x + slow.attention(i, slow.norm(h, slow.of(i, "attention_norm.weight")), positions)
        h = read(x, deltas)
        x = x + slow.feed_forward(i, slow.norm(h, slow.of(i, "ffn_norm.weight")))
        if (i + 1) % layers_per_block == 0:
            deltas, start = [*deltas, x - start], x
    assert read.used == len(read.learned)
    return slow.logits(x)


DEFINITIONS = {"delta_attnres": delta_block, "delta_attnres_paper": block_deltas}


@pytest.mark.parametrize("layers", [4, 6, 7])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_equals_the_published_definition(checks: Any, name: str, layers: int) -> None:
    checks.equals_slow(NAMED[name], DEFINITIONS[name], layers=layers)


def test_entries_are_the_ones_of_the_published_code(checks: Any) -> None:
    """x_0, d_1, x_0 + d_2, d_1 + d_3, with d_k what block k adds; the attention that follows a block sees one fewer."""
    shape = checks.small_shape(7)
    model = checks.build(NAMED["delta_attnres"], shape, moved=0.3).double()
    state = model.stream.start(model.tok_embeddings(checks.tokens_of()))
    ends = [state.running]
    for layer in model.layers.values():
        state = layer(state, None)
        ends.append(state.running)
    x0, d1, d2, d3 = ends[0], ends[2] - ends[0], ends[4] - ends[2], ends[6] - ends[4]
    for entry, expected in zip(state.finished, (x0, d1, x0 + d2, d1 + d3), strict=True):
        torch.testing.assert_close(entry, expected, rtol=1e-12, atol=1e-14)
    seen = [len(read.sources) for read in NAMED["delta_attnres"].plan(shape).reads()]
    assert seen == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    assert all(source.place is Place.FINISHED for read in model.stream.reads for source in read.sources)


def test_queries_start_as_the_published_code_draws_them(checks: Any) -> None:
    """Like its linear layers: with standard deviation 0.02, here cut off at three of them, which takes 1.3% off."""
    queries = checks.build(NAMED["delta_attnres"], checks.small_shape(24, width=256)).stream.queries
    assert queries.std().item() == pytest.approx(0.02 * 0.9866, rel=0.02)
    assert abs(queries.mean().item()) < 4 * 0.02 / queries.numel() ** 0.5
    assert not checks.build(NAMED["delta_attnres_paper"]).stream.queries.any()
