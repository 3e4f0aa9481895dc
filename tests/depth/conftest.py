"""A second, slow decoder, written out in fp64 with a loop over tokens and heads, from which tests put variants
together."""

import re
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.flop_counter import FlopCounterMode

from torchtitan_ext.depth.architecture import Architecture
from torchtitan_ext.depth.attention import FusedAttention, document_mask
from torchtitan_ext.depth.attentions import QK_NORM_EPS, Attention
from torchtitan_ext.depth.block import ROPE_THETA
from torchtitan_ext.depth.build import STANDARD, decoder_config
from torchtitan_ext.depth.decoder import DepthDecoder
from torchtitan_ext.depth.variant import Variant
from torchtitan_ext.sizes import Shape, shape_of
from torchtitan_ext.titan.graphs import compile_layers

VOCABULARY = 67
NORM_EPS = 1e-5

# The model turns queries and keys in fp32, the slow decoder in fp64: 2^-24 relative, and a few roundings on top.
ROPE_TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def small_shape(layers: int = 4, **numbers: int) -> Shape:
    return shape_of("debug", VOCABULARY, layers=layers, **{"width": 32, "heads": 4, "kv_heads": 2, **numbers})


def is_added(name: str) -> bool:
    """Whether a parameter of that name is one that a variant or an attention adds."""
    return re.search(r"_connection\.|^stream\.|attention\.(gate|[qk]_norm)\.", name) is not None


def build(
    variant: Variant,
    shape: Shape | None = None,
    *,
    documents: bool = False,
    moved: float = 0.0,
    attention: Attention = STANDARD,
) -> DepthDecoder:
    """A decoder with its initial weights; to what variant and attention add, normal numbers times ``moved`` are
    added."""
    mask = document_mask if documents else None
    config = decoder_config(
        shape or small_shape(),
        variant,
        attention,
        seq_len=32,
        inner_attention=FusedAttention.Config(),
        make_mask=mask,
    )
    for layer in config.layers:
        layer.attention.rope.max_seq_len = 64
    model = config.build()
    model.init_states()
    for name, parameter in model.named_parameters():
        if is_added(name):
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            parameter.data += moved * torch.randn(parameter.shape, generator=generator)
    return model


def tokens_of(length: int = 13, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class SlowDecoder:
    """The parts of a decoder for one sequence [T] at a time, from a model's weights and nothing else of it.

    Parameters are fp64 copies that record gradients. A variant is the sequence of calls that a test makes.
    """

    def __init__(self, model: DepthDecoder, shape: Shape) -> None:
        self.shape = shape
        self.weights = {
            name: parameter.detach().double().requires_grad_(parameter.requires_grad)
            for name, parameter in model.named_parameters()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.weights[name]

    def of(self, layer: int, name: str) -> torch.Tensor:
        return self.weights[f"layers.{layer}.{name}"]

    def norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float = NORM_EPS) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    def normed_heads(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys behind the norm over each head that ``qk_norm`` has."""
        q_weight, k_weight = (self.of(layer, f"attention.{side}_norm.weight") for side in "qk")
        return self.norm(q, q_weight, QK_NORM_EPS), self.norm(k, k_weight, QK_NORM_EPS)

    def qkv(self, layer: int, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, N, H], keys and values [T, K, H]. A key head's rows: its queries, its key, its value."""
        s = self.shape
        groups = (h @ self.of(layer, "attention.qkv_linear.wqkv.weight").T).unflatten(-1, (s.kv_heads, -1, s.head_dim))
        per_key = s.heads // s.kv_heads
        return groups[:, :, :per_key].flatten(1, 2), groups[:, :, per_key], groups[:, :, per_key + 1]

    def rotate(self, x: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Turn the coordinates (2j, 2j + 1) of [T, N, H] by position · θ^(-2j / H)."""
        turned = torch.empty_like(x)
        for t, position in enumerate(positions):
            for j in range(self.shape.head_dim // 2):
                angle = torch.tensor(position * ROPE_THETA ** (-2 * j / self.shape.head_dim), dtype=torch.float64)
                even, odd = x[t, :, 2 * j], x[t, :, 2 * j + 1]
                turned[t, :, 2 * j] = even * angle.cos() - odd * angle.sin()
                turned[t, :, 2 * j + 1] = even * angle.sin() + odd * angle.cos()
        return turned

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Sequence[int],
        depth: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention for queries and keys that are turned, over each token's document so far and over the (key, value)
        pairs of ``depth`` at the token itself, times ``gates`` [T, N, H or 1]; with the output projection, [T, D]."""
        rows = []
        for t in range(len(positions)):
            heads = []
            for n in range(self.shape.heads):
                g = n // (self.shape.heads // self.shape.kv_heads)
                seen = range(t - positions[t], t + 1)
                keys = [k[s, g] for s in seen] + [key[t, g] for key, _ in depth]
                values = [v[s, g] for s in seen] + [value[t, g] for _, value in depth]
                scores = torch.stack([q[t, n] @ key for key in keys]) / self.shape.head_dim**0.5
                weights = (scores - scores.max()).exp()
                head = sum(w * value for w, value in zip(weights / weights.sum(), values, strict=True))
                heads.append(head if gates is None else head * gates[t, n])
            rows.append(torch.cat(heads))
        return torch.stack(rows) @ self.of(layer, "attention.wo.weight").T

    def attention(self, layer: int, h: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        q, k, v = self.qkv(layer, h)
        return self.attend(layer, self.rotate(q, positions), self.rotate(k, positions), v, positions)

    def feed_forward(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        gate, up = (h @ self.of(layer, f"feed_forward.{w}.weight").T for w in ("w1", "w3"))
        return (gate / (1 + (-gate).exp()) * up) @ self.of(layer, "feed_forward.w2.weight").T

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights["tok_embeddings.weight"][tokens]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, self.weights["norm.weight"]) @ self.weights["tok_embeddings.weight"].T


Forward = Callable[[SlowDecoder, torch.Tensor, Sequence[int]], torch.Tensor]
"""A variant written out: logits [T, V] from the slow decoder, the tokens [T] and their positions."""


class Checks:
    """What every variant must pass, whatever it computes."""

    small_shape = staticmethod(small_shape)
    build = staticmethod(build)
    is_added = staticmethod(is_added)
    tokens_of = staticmethod(tokens_of)
    loss_of = staticmethod(loss_of)
    slow = SlowDecoder
    tolerance = ROPE_TOLERANCE

    def equals_slow(
        self,
        variant: Variant,
        forward: Forward,
        moved: float = 0.3,
        attention: Attention = STANDARD,
        **numbers: int,
    ) -> None:
        """The model in fp64 computes what ``forward`` does, with and without documents."""
        shape = small_shape(**{"layers": 3, "width": 16, "heads": 4, "kv_heads": 2, **numbers})
        model = build(variant, shape, documents=True, moved=moved, attention=attention).double()
        slow, tokens = SlowDecoder(model, shape), tokens_of(7)
        for positions in (list(range(7)), [0, 1, 2, 0, 0, 1, 2]):
            got = model(tokens, positions=torch.tensor([positions, positions]))
            expected = torch.stack([forward(slow, row, positions) for row in tokens])
            torch.testing.assert_close(got, expected, **ROPE_TOLERANCE)

    def starts_as_it_says(self, variant: Variant) -> None:
        """The logits of the standard model of the same seed where the variant promises them, others where not."""
        got, standard = build(variant)(tokens_of()), build(Variant())(tokens_of())
        assert torch.allclose(got, standard, rtol=1e-5, atol=1e-6) == variant.starts_as_standard()

    def starts_as_standard(self, variant: Variant) -> None:
        """The same logits as the standard model, to the bit, from the same seed, and as the variant says."""
        assert variant.starts_as_standard()
        assert torch.equal(build(variant)(tokens_of()), build(Variant())(tokens_of()))

    def is_causal(self, variant: Variant, shape: Shape | None = None, attention: Attention = STANDARD) -> None:
        """A later token or another document changes no bit of an output."""
        model = build(variant, shape, documents=True, moved=0.3, attention=attention)
        tokens = tokens_of(12)
        positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4]] * 2)
        before = model(tokens, positions=positions)
        for changed, same, other in ((4, slice(0, 4), slice(4, 7)), (2, slice(7, 12), slice(2, 7))):
            altered = tokens.clone()
            altered[:, changed] = (altered[:, changed] + 1) % VOCABULARY
            after = model(altered, positions=positions)
            assert torch.equal(after[:, same], before[:, same])
            assert not torch.equal(after[:, other], before[:, other])

    def counts_are_those_of_the_model(
        self, variant: Variant, sizes: Sequence[str], attention: Attention = STANDARD
    ) -> None:
        """The parameter formula, on models without memory."""
        for size in sizes:
            shape = shape_of(size, VOCABULARY)
            config = decoder_config(shape, variant, attention, seq_len=64, inner_attention=FusedAttention.Config())
            with torch.device("meta"):
                model = config.build()
            parameters, flops = config.get_nparams_and_flops(model, 64)
            built_of = Architecture(variant, attention)
            assert parameters == built_of.parameters(shape)
            assert flops == built_of.flops_per_token(shape, 64)

    def matrix_flops(self, variant: Variant, shape: Shape, attention: Attention = STANDARD) -> float:
        """FLOPs per token in matrix products beyond the standard model's, forward and backward, counted by PyTorch."""

        def counted(model: DepthDecoder) -> int:
            with FlopCounterMode(display=False) as counter:
                loss_of(model, tokens_of()).backward()
            return counter.get_total_flops()

        more = counted(build(variant, shape, moved=0.1, attention=attention)) - counted(build(Variant(), shape))
        return more / tokens_of()[:, 1:].numel()

    def trains_finitely(self, variant: Variant, layers: int, dtype: torch.dtype) -> None:
        """A finite gradient for every parameter that is trained."""
        model = build(variant, small_shape(layers), moved=0.05)
        for parameter in model.parameters():  # not the complex numbers of the rotary positions
            parameter.data = parameter.data.to(dtype)
        loss_of(model, tokens_of()).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert parameter.grad.isfinite().all(), name

    def compiles(self, variant: Variant, layers: int = 5, deeper: int = 9, attention: Attention = STANDARD) -> None:
        """Compiled it gives what it gives eagerly, and a deeper model needs no further graph."""
        graphs = 0

        def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
            nonlocal graphs
            graphs += 1
            return aot_eager(graph, inputs)

        def compile_and_compare(model: DepthDecoder) -> None:
            loss, gradients = gradients_of(model)
            compile_layers(model, count)
            compiled_loss, compiled_gradients = gradients_of(model)
            torch.testing.assert_close(compiled_loss, loss, rtol=1e-6, atol=0)
            for name, gradient in gradients.items():
                torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-5, atol=1e-7, msg=name)

        torch._dynamo.reset()
        compile_and_compare(build(variant, small_shape(layers), moved=0.1, attention=attention))
        needed = graphs
        compile_and_compare(build(variant, small_shape(deeper), moved=0.1, attention=attention))
        assert graphs == needed > 0


def gradients_of(model: DepthDecoder) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad()
    loss = loss_of(model, tokens_of())
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture
def checks() -> Checks:
    return Checks()
