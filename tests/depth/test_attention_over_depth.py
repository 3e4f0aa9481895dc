"""Attention over depth against lists: a second, slow implementation that keeps every output and sums it anew."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtitan_ext.depth.attention import FusedAttention
from torchtitan_ext.depth.attention_over_depth import AttentionOverDepth
from torchtitan_ext.depth.attention_over_depth_named import NAMED
from torchtitan_ext.depth.build import decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.ops.depth_query import depth_weights
from torchtitan_ext.sizes import Shape, shape_of

VOCABULARY = 61
KEY_EPS = 1e-6


def shape_with(layers: int, **numbers: int) -> Shape:
    return shape_of("debug", VOCABULARY, layers=layers, **{"width": 16, "heads": 2, "kv_heads": 1, **numbers})


class NoPositions(nn.Module):
    """In place of torchtitan's RoPE, which computes in fp32 whatever it is given."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, positions: None) -> tuple[torch.Tensor, torch.Tensor]:
        return query, key


def built(variant: Variant, shape: Shape, dtype: torch.dtype = torch.float64) -> DepthDecoder:
    config = decoder_config(shape, variant, seq_len=16, inner_attention=FusedAttention.Config())
    for layer in config.layers:
        layer.attention.rope.max_seq_len = 1
    model = config.build()
    model.init_states()
    for layer in model.layers.values():
        layer.attention.rope = NoPositions()
    return model.to(dtype)


def stirred(model: DepthDecoder, scale: float = 0.5) -> DepthDecoder:
    """The model after everything that its reads learn has moved away from its initial value."""
    for i, parameter in enumerate(model.stream.parameters()):
        generator = torch.Generator().manual_seed(i)
        moved = parameter.detach() + scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = moved.to(parameter.dtype)
    return model


def tokens_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def rms(x: torch.Tensor) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + KEY_EPS).sqrt()


def turned(x: torch.Tensor, position: int) -> torch.Tensor:
    """RoPE at an absolute position, with complex numbers; coordinate j is the real and j + K/2 the imaginary part."""
    half = x.shape[-1] // 2
    angle = position * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


class ListModel:
    """The whole decoder from the definition. The sublayers are the model's own; all that joins them is here."""

    def __init__(self, model: DepthDecoder, variant: AttentionOverDepth, shape: Shape) -> None:
        self.model, self.v, self.shape = model, variant, shape
        self.learned = dict(model.stream.named_parameters())
        self.per_layer = 2 if variant.granularity == "sublayer" else 1
        self.size = variant.block_size or self.per_layer * math.ceil(shape.layers / variant.blocks)
        self.key_width = variant.key_rank or int(variant.key_fraction * shape.width)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.embedding = self.model.tok_embeddings(tokens)
        self.outputs: list[torch.Tensor] = []
        self.added: list[torch.Tensor] = []
        self.choosing_reads = 0
        self.query_rows: list[object] = []
        for number, layer in enumerate(self.model.layers.values()):
            h = self.read(number)
            a = layer.attention_sublayer(h, None, None)
            if self.per_layer == 1:
                f = layer.feed_forward_sublayer(h + a)
                self.write(h, a + f)
            else:
                self.write(h, a)
                h = self.read(number)
                self.write(h, layer.feed_forward_sublayer(h))
        last = sum(self.added, self.embedding) if self.v.routing == "add" else self.read(None)
        return self.model.lm_head(self.model.norm(last))

    def write(self, read: torch.Tensor, added: torch.Tensor) -> None:
        self.added.append(added)
        self.outputs.append(read + added if self.v.source_kind == "state" else added)

    def summary(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        total = sum(outputs[1:], outputs[0])
        return total / len(outputs) if self.v.block_summary == "mean" else total

    def sources(self) -> list[tuple[torch.Tensor, int, int]]:
        """(value, block, position)"""
        done, size = len(self.outputs), self.size
        blocks = [(self.embedding, 0, 0)]
        for block in range(1, (done - self.v.late_blocks) // size + 1):
            if self.v.block_summary == "alternating":
                value = sum(self.added[: block * size], self.embedding) - blocks[-1][0]
            else:
                value = self.summary(self.outputs[(block - 1) * size : block * size])
            blocks.append((value, block, block * size))
        if self.v.sparse:
            near = blocks[-self.v.nearest :]
            blocks = [b for b in blocks[: -self.v.nearest] if b[1] % self.v.every == 0] + near
        unfinished = self.outputs[done // size * size :]
        if unfinished and self.v.routing == "replace":
            blocks.append((self.summary(unfinished), done // size + 1, done))
        if self.v.window:
            for output in range(max(1, done - self.v.window + 1), done + 1):
                blocks.append((self.outputs[output - 1], math.ceil(output / size), output))
        return blocks

    def read(self, layer: int | None) -> torch.Tensor:
        """The input of a sublayer of that layer, or of the final norm."""
        done = len(self.outputs)
        running = sum(self.added, self.embedding)
        if self.v.routing == "add" and done == 0:
            return running
        sources = self.sources()
        if len(sources) == 1:
            h = sources[0][0]
        else:
            row, self.choosing_reads = self.choosing_reads, self.choosing_reads + 1
            shared: object = ("own", row)
            if layer is not None and self.v.query_share != "read":
                shared = {"all": 0, "block": done // self.size, "group": layer // self.v.query_group}[
                    self.v.query_share
                ]
            if shared not in self.query_rows:
                self.query_rows.append(shared)
            query = self.learned["queries"][self.query_rows.index(shared)]
            if self.v.query_rank:
                x = running
                if self.v.routing == "replace":
                    x = self.summary(self.outputs[(done - 1) // self.size * self.size :]) if done else self.embedding
                    if self.v.block_summary == "mean":  # what is kept is the sum; normalised, they differ by eps alone
                        x = x * len(self.outputs[(done - 1) // self.size * self.size :])
                down, up = self.learned["query_down"][row], self.learned["query_up"][row]
                query = query + (x / rms(x)) @ down.T @ up
            if self.v.query_scale == "inverse_sqrt":
                query = query / math.sqrt(self.key_width)
            logits = []
            for value, block, position in sources:
                key = value[..., value.shape[-1] - self.key_width :]
                gain = self.learned["gains"][block if self.v.key_gain == "block" else row]
                key, q = key / rms(key) * gain, query
                if self.v.position == "rotary":
                    # The product of q and k turned by their positions; the gain is not turned.
                    q, key = turned(q, done), turned(key, position)
                logit = (q * key).sum(-1)
                if self.v.position == "linear":
                    logit = logit - self.v.slope * (done - position)
                logits.append(logit)
            weights = torch.stack(logits).softmax(0)
            h = sum(w.unsqueeze(-1) * source[0] for w, source in zip(weights, sources, strict=True))
            if self.v.read_scale == "sources":
                h = h * len(sources)
        if self.v.value_map:
            h = h @ self.learned["value_map"].T
        return running + h if self.v.routing == "add" else h


COMBINATIONS = {
    "scaled queries": AttentionOverDepth(block_size=2, query_scale="inverse_sqrt", query_rank=2),
    "scaled reads": AttentionOverDepth(granularity="sublayer", block_size=3, read_scale="sources", value_map=True),
    "state sources": AttentionOverDepth(block_size=2, source_kind="state"),
    "state sources by sublayer": AttentionOverDepth(
        granularity="sublayer", block_size=3, source_kind="state", window=2
    ),
    "added states": AttentionOverDepth(block_size=2, source_kind="state", routing="add", window=3, value_map=True),
    "much at once": AttentionOverDepth(
        granularity="sublayer", block_size=3, window=2, query_share="group", query_group=2, query_rank=3,
        key_gain="block", position="rotary", sparse=True, nearest=2, every=3, value_map=True, key_rank=6,
    ),
    "input-dependent, turned, added": AttentionOverDepth(
        granularity="sublayer", block_size=2, query_rank=2, position="rotary", routing="add", block_summary="sum"
    ),
    "alternating at once": AttentionOverDepth(
        block_size=2, block_summary="alternating", routing="add", window=3, query_scale="inverse_sqrt"
    ),
    "late sums": AttentionOverDepth(block_size=2, block_summary="sum", routing="add", late_blocks=True, value_map=True),
}  # fmt: skip
EVERY = {**NAMED, **COMBINATIONS}
every_variant = pytest.mark.parametrize("variant", EVERY.values(), ids=EVERY)


@every_variant
@pytest.mark.parametrize("layers", [4, 7])
def test_model_and_gradients_are_those_of_the_lists(variant: AttentionOverDepth, layers: int) -> None:
    shape = shape_with(layers)
    model = stirred(built(variant, shape))
    lists = ListModel(model, variant, shape)
    tokens = tokens_of(8)
    torch.testing.assert_close(model(tokens), lists(tokens), rtol=1e-9, atol=1e-9)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss_of(model, tokens), parameters)
    expected = torch.autograd.grad(loss_of(lists, tokens), parameters)
    for (name, _), gradient, reference in zip(model.named_parameters(), gradients, expected, strict=True):
        torch.testing.assert_close(
            gradient, reference, rtol=1e-7, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )
    # Every learned row is used, and only once where it is not meant to be shared.
    assert lists.choosing_reads == sum(n > 1 for n in variant.sources_per_read(shape))
    assert len(lists.query_rows) == len(model.stream.queries)


REAL_SIZES = ("1.2M", "10M", "100M")


def real_shape(size: str) -> Shape:
    return shape_of(size, VOCABULARY)


def norms_in_order(model: DepthDecoder) -> list[nn.RMSNorm]:
    """The norms that follow a model's reads by sublayer."""
    return [*(n for layer in model.layers.values() for n in (layer.attention_norm, layer.ffn_norm)), model.norm]


@pytest.mark.parametrize("size", REAL_SIZES)
@pytest.mark.parametrize("name", ["attnres_full", "attnres_block"])
def test_where_a_run_starts(name: str, size: str) -> None:
    """Equal weights make a read of n sources their sum divided by n, so the next norm, which divides by
    sqrt(mean of squares + eps), computes what the standard model's would with n² eps. At real widths that is another
    function than the standard model's; with ``read_scale`` "sources" it is the same."""
    shape = real_shape(size)
    published = built(NAMED[name], shape)
    mended = built(replace(NAMED[name], read_scale="sources"), shape)
    standard = built(Variant(), shape)
    tokens = tokens_of(9)
    expected = standard(tokens)
    torch.testing.assert_close(mended(tokens), expected, rtol=1e-9, atol=1e-9)
    logits = published(tokens)
    assert (logits - expected).norm() > 0.005 * expected.norm()
    for norm, sources in zip(norms_in_order(standard), NAMED[name].sources_per_read(shape), strict=True):
        norm.eps *= sources**2
    torch.testing.assert_close(logits, standard(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [{"block_size": 1}, {"block_size": 3}, {"block_size": 4}, {"block_size": 0, "blocks": 2}],
)
def test_reads_scaled_by_their_sources_start_with_the_gradients_of_the_standard_model(options: dict[str, int]) -> None:
    shape = shape_with(4)
    variant = AttentionOverDepth(granularity="sublayer", block_summary="sum", read_scale="sources", **options)
    model, standard = built(variant, shape), built(Variant(), shape)
    tokens = tokens_of(9)
    loss_of(model, tokens).backward()
    loss_of(standard, tokens).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in standard.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-7, atol=1e-12)


def test_blocks_of_one_are_the_unblocked_form() -> None:
    shape = shape_with(4)
    tokens = tokens_of(8)
    logits = [
        stirred(built(AttentionOverDepth(**options), shape))(tokens)
        for options in ({"block_summary": "mean"}, {"block_summary": "sum"}, {"block_size": 0, "blocks": 4})
    ]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert AttentionOverDepth().sources_per_read(shape) == [1, 2, 3, 4, 5]


BASE = AttentionOverDepth(block_size=2)


@pytest.mark.parametrize(
    "options",
    [
        {"granularity": "sublayer"},
        {"source_kind": "state"},
        {"block_size": 3},
        {"block_size": 0, "blocks": 3},
        {"block_summary": "sum"},
        {"window": 2},
        {"query_share": "group", "query_group": 3},
        {"query_share": "block"},
        {"query_share": "all"},
        {"query_rank": 2},
        {"key_gain": "block"},
        {"position": "linear"},
        {"position": "rotary"},
        {"sparse": True, "nearest": 1, "every": 3},
        {"value_map": True},
        {"key_rank": 4},
        {"key_fraction": 0.5},
        {"routing": "add"},
        {"query_scale": "inverse_sqrt"},
        {"query_std": 0.02},
    ],
    ids=str,
)
def test_every_option_changes_the_output(options: dict[str, object]) -> None:
    shape = shape_with(7)
    tokens = tokens_of(8)
    base, changed = (stirred(built(variant, shape))(tokens) for variant in (BASE, replace(BASE, **options)))
    assert (base - changed).norm() > 1e-4 * base.norm()


@pytest.mark.parametrize("options", [{"block_summary": "alternating"}, {"late_blocks": True}], ids=str)
def test_every_option_beside_the_running_sum_changes_the_output(options: dict[str, object]) -> None:
    base = replace(BASE, routing="add")
    tokens = tokens_of(8)
    one, other = (stirred(built(variant, shape_with(7)))(tokens) for variant in (base, replace(base, **options)))
    assert (one - other).norm() > 1e-4 * one.norm()


@pytest.mark.parametrize(("first", "second"), [({"slope": 0.1}, {"slope": 0.2}), ({"every": 3}, {"every": 4})])
def test_numbers_of_an_option_count(first: dict[str, float], second: dict[str, float]) -> None:
    base = AttentionOverDepth(position="linear", sparse=True, nearest=1)
    shape = shape_with(7)
    tokens = tokens_of(8)
    one, other = (stirred(built(replace(base, **numbers), shape))(tokens) for numbers in (first, second))
    assert (one - other).norm() > 1e-6 * one.norm()


@every_variant
def test_no_token_changes_what_came_before_it_or_another_document(variant: AttentionOverDepth, checks: Any) -> None:
    checks.is_causal(variant)


@pytest.mark.slow
@every_variant
def test_compiled_equals_eager_at_any_depth(variant: AttentionOverDepth, checks: Any) -> None:
    checks.compiles(variant)


@every_variant
def test_weights_of_every_read_sum_to_one(variant: AttentionOverDepth) -> None:
    shape = shape_with(4)
    model = stirred(built(variant, shape))
    stream = model.stream
    state = stream.start(model.tok_embeddings(tokens_of(6)))
    seen = []
    for layer in model.layers.values():
        state = layer(state, None)
        outputs = len(seen) * variant.outputs_per_layer + variant.outputs_per_layer
        seen.append(outputs)
        if outputs < len(stream.reads) and stream.reads[outputs].row is not None:
            weights = depth_weights(stream.sources(state, outputs), stream.query(state, outputs))
            assert weights.shape == (2, 6, variant.sources_per_read(shape)[outputs])
            torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["block_hybrid_memory", "block_input_dep_query", "attnres_block", "delta_attnres"])
def test_recomputing_a_layer_gives_the_same_gradients(name: str) -> None:
    tokens = tokens_of(8)
    model, again = (stirred(built(NAMED[name], shape_with(4))) for _ in range(2))
    for layer in again.layers.values():
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    loss_of(model, tokens).backward()
    loss_of(again, tokens).backward()
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [4, 8, 16])
@pytest.mark.parametrize("layers", [24, 48])
def test_deep_models_have_finite_gradients(layers: int, blocks: int, dtype: torch.dtype) -> None:
    variant = replace(NAMED["attnres_block"], blocks=blocks)
    model = stirred(built(variant, shape_with(layers), dtype=dtype))
    loss = loss_of(model, tokens_of(8))
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
