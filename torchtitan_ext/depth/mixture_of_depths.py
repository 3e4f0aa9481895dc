"""Mixture-of-depths attention: each head attends to its sequence and to earlier layers' keys at the same token.

Shape suffixes: B = batch, T = tokens, D = model width, N = query heads, K = key/value heads, H = head width.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import FlexAttention

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.ops import moda
from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.recipe import INIT_STD
from torchtitan_ext.sizes import Shape

from . import initial
from .attention_stages import output, over_sequence, project
from .decoder import DepthLayer
from .observe import note
from .state import Link, Stream
from .variant import Variant

DepthCache = tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]
"""The residual stream x [B, T, D], and the keys and the values [B, T, K, H] that layers have written so far, the
oldest first."""

NORMS = ("post", "pre", "reordered")
"""Where a sublayer f has its norm n: x ← n(x + f(x)), x ← x + f(n(x)), or x ← x + n(f(x))."""


class DepthCacheLink(Link):
    """What one layer writes to the cache: its attention's keys and values, and those that ``feed_forward_kv`` makes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Link.Config):
        writes: bool
        head_dim: int
        feed_forward_kv: Linear.Config | None

    in_sublayers: ClassVar[bool] = True
    full_precision: ClassVar[bool] = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.writes, self.head_dim = config.writes, config.head_dim
        self.feed_forward_kv = config.feed_forward_kv.build() if config.feed_forward_kv is not None else None

    def key_value(self, h_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The feed-forward's key and value, each [B, T, K, H], from its input."""
        assert self.feed_forward_kv is not None
        # Two products with the halves of one matrix: halves of one product would be views with strides of their own,
        # which compiled code tells from the attention's keys and values.
        k_weight, v_weight = self.feed_forward_kv.weight.chunk(2)
        heads = (-1, self.head_dim)
        return F.linear(h_BTD, k_weight).unflatten(-1, heads), F.linear(h_BTD, v_weight).unflatten(-1, heads)


class DepthCacheStream(Stream):
    """An empty cache at the start; the final norm reads the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Stream.Config):
        pass

    def start(self, x_BTD: torch.Tensor) -> DepthCache:
        return x_BTD, (), ()

    def finish(self, state: DepthCache) -> torch.Tensor:
        return state[0]


class MixtureOfDepthsLayer(DepthLayer):
    """A layer over the residual stream and the cache.

    Compiled in pieces that do not know how many entries the cache has: what comes before the softmax, what comes after
    it, and the kernels that the softmax runs, forward and backward, on a chunk of entries. What only some layers do,
    writing a key and a value of the feed-forward, is left outside: it would be a graph of its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(DepthLayer.Config):
        norm_place: str
        rotated_keys: bool

    sublayers: ClassVar[tuple[str, ...]] = ("before_softmax", "after_softmax")
    kernels: ClassVar[tuple[str, ...]] = ("depth_forward", "depth_backward")
    link: DepthCacheLink
    depth_forward = staticmethod(moda.depth_forward)
    depth_backward = staticmethod(moda.depth_backward)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_place, self.rotated_keys = config.norm_place, config.rotated_keys

    def before_softmax(
        self, x_BTD: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries [B, T, N, H] and keys, values, and keys that are not rotated, [B, T, K, H]."""
        h_BTD = self.attention_norm(x_BTD) if self.norm_place == "pre" else x_BTD
        q_BTNH, k_BTKH, v_BTKH = project(self.attention, h_BTD)
        q_BTNH, rotated_BTKH = self.attention.rope(q_BTNH, k_BTKH, positions)
        return q_BTNH, rotated_BTKH, v_BTKH, k_BTKH

    def softmax(
        self,
        q_BTNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        keys: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        attention_masks: Any,
    ) -> torch.Tensor:
        """Attention over the sequence and the cache, [B, T, N, H]; over an empty cache it is the standard attention."""
        attention = self.attention
        if not keys:
            return over_sequence(attention, q_BTNH, k_BTKH, v_BTKH, attention_masks)
        kernels = moda.DepthKernels(self.depth_forward, self.depth_backward)
        if isinstance(attention.inner_attention, FlexAttention):
            return attention.inner_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                attention_masks=attention_masks,
                scale=attention.scaling,
                enable_gqa=attention.enable_gqa,
                out_transform=lambda out_BTNH, lse_BTN: moda.join_depth(
                    out_BTNH, lse_BTN, q_BTNH, keys, values, scale=attention.scaling, kernels=kernels
                ),
            )
        return moda.attend_with_depth(
            q_BTNH, k_BTKH, v_BTKH, keys, values, allowed=attention_masks, scale=attention.scaling, kernels=kernels
        )

    def depth_mass(
        self, q_BTNH: torch.Tensor, k_BTKH: torch.Tensor, keys: tuple[torch.Tensor, ...], attention_masks: Any
    ) -> torch.Tensor:
        """The share of the softmax that goes to the cache, averaged over tokens and heads: what attention gives where
        the values of the sequence are 0 and those of the cache are 1."""
        zeros, ones = torch.zeros_like(k_BTKH), tuple(torch.ones_like(key) for key in keys)
        return self.softmax(q_BTNH, k_BTKH, zeros, keys, ones, attention_masks).float().mean()

    def after_softmax(self, x_BTD: torch.Tensor, heads_BTNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream after the layer, and the feed-forward's input, [B, T, D]."""
        x_BTD = self.add(x_BTD, output(self.attention, heads_BTNH), self.attention_norm)
        h_BTD = self.ffn_norm(x_BTD) if self.norm_place == "pre" else x_BTD
        return self.add(x_BTD, self.feed_forward(h_BTD), self.ffn_norm), h_BTD

    def add(self, x_BTD: torch.Tensor, y_BTD: torch.Tensor, norm: nn.Module) -> torch.Tensor:
        """The residual stream after a sublayer that gave y."""
        if self.norm_place == "post":
            return norm(x_BTD + y_BTD)
        return x_BTD + (norm(y_BTD) if self.norm_place == "reordered" else y_BTD)

    def forward(self, state: DepthCache, attention_masks: Any, positions: torch.Tensor | None = None) -> DepthCache:
        x_BTD, keys, values = state
        q_BTNH, k_BTKH, v_BTKH, unrotated_BTKH = self.before_softmax(x_BTD, positions)
        heads_BTNH = self.softmax(q_BTNH, k_BTKH, v_BTKH, keys, values, attention_masks)
        if keys:
            note("depth_key_mass", lambda: self.depth_mass(q_BTNH, k_BTKH, keys, attention_masks))
        x_BTD, h_BTD = self.after_softmax(x_BTD, heads_BTNH)
        if self.link.writes:
            keys, values = (*keys, k_BTKH if self.rotated_keys else unrotated_BTKH), (*values, v_BTKH)
        if self.link.feed_forward_kv is not None:
            k_BTKH, v_BTKH = self.link.key_value(h_BTD)
            if self.rotated_keys:
                # rope turns queries and keys together; with no queries here, one head of the keys stands in.
                _, k_BTKH = self.attention.rope(k_BTKH[:, :, :1], k_BTKH, positions)
            keys, values = (*keys, k_BTKH), (*values, v_BTKH)
        return x_BTD, keys, values


@dataclass(frozen=True)
class MixtureOfDepths(Variant):
    """One softmax over {the sequence's keys at this layer} ∪ {keys that earlier layers wrote at this token}.

    Zhu et al., arXiv 2603.15619, section 2.2 (read, operate, write) and algorithm 1, as their language model has it:
    github.com/hustvl/MoDA @992a275081, language_tasks/BlaGPT/bla_gpt/bla_gpt_moda_depth_scaling.py. With R_t the
    rotary turn at position t and E entries in the cache, which a head reads at its own token alone::

        o_t = softmax([R_t q_t·R_1 k_1 … R_t q_t·R_t k_t, R_t q_t·k⁰_t … R_t q_t·k^(E−1)_t] / √H)
              [v_1 … v_t, v⁰_t … v^(E−1)_t]
        x ← n1(x + A(x))      x ← n2(x + F(x))

    A layer reads first and then writes its attention's k_t and v_t, before rotary positions, and W_kv h, with h the
    feed-forward's input and a matrix D → 2·K·H of its own (the paper's default: table 3, row 4).

    Options:
        write_every: layers 0, s, 2s … write; 1 for every layer, as in the code. The last layer never does: nobody
            reads it.
        feed_forward_writes: whether a layer that writes also writes W_kv h.
        norm: "post", as above, is the code's; "pre", x + f(n(x)), is what the paper compares it with, and the model
            that other variants are compared with (``moda_pre_norm``); "reordered", x + n(f(x)), is OLMo 2's.
        rotated_keys: cached keys are turned like the query (ours). A query and a key of one token are then turned by
            the same angle, so that a depth logit is ⟨q_t, k_t⟩, whatever the position; in the code it depends on it.

    The paper reports, on FineWeb-Edu at 48 layers of width 384 (table 6), validation loss 3.3484 post-norm (3.3653
    without the feed-forward's entries, 3.4062 without any), and 3.3656 pre-norm (3.3759, 3.3800). With the OLMo 2
    recipe over 400B tokens (tables 3 to 5), whose norms are reordered (the paper does not say whether it kept
    them): C4 validation perplexity 18.21 against 18.59 at 700M (18.48 without the feed-forward's entries; 18.31 for a
    larger standard model), mean perplexity 13.47 against 13.67 and mean accuracy of 10 tasks 64.39 against 62.28 at
    1.5B, for 3.7% more FLOPs. Its fused kernel takes 2.7% (64k tokens) to 26% (4k) longer than FlashAttention-2.

    W_kv starts like any other projection into a layer (normal, 0.02; no biases, as nowhere in the models here). The
    code's models normalise queries and keys per head, cached keys by the norm of the layer that reads them; the models
    here have no such norm. Nothing starts at zero, so that the model differs from the standard one from the first step
    on; the first layer of ``moda_pre_norm`` does not.
    """

    summary: str = (
        "each head attends to its sequence and to earlier layers' keys at its token, in one softmax; post-norm"
    )
    source: str = (
        "Zhu et al., arXiv 2603.15619; github.com/hustvl/MoDA, language_tasks: validation loss 3.3484 against "
        "3.4062 post-norm without depth keys (48 layers, width 384)"
    )
    write_every: int = 1
    feed_forward_writes: bool = True
    norm: str = "post"
    rotated_keys: bool = False

    def check(self, shape: Shape) -> None:
        if self.norm not in NORMS:
            raise UserError(f"depth.norm {self.norm!r} is unknown; {nearest(self.norm, NORMS)}")
        if shape.layers < 2:
            raise UserError("mixture-of-depths attention reads earlier layers; model.layers is 1, make it 2 or more")
        if not 1 <= self.write_every < shape.layers:
            raise UserError(
                f"depth.write_every is {self.write_every}, but a model of {shape.layers} layers needs "
                f"1 (every layer writes) to {shape.layers - 1} (the first alone)"
            )

    def _writers(self, shape: Shape) -> range:
        return range(0, shape.layers - 1, self.write_every)

    def link(self, shape: Shape, layer: int) -> Link.Config:
        writes = layer in self._writers(shape)
        feed_forward_kv = None
        if writes and self.feed_forward_writes:
            feed_forward_kv = Linear.Config(
                in_features=shape.width,
                out_features=2 * shape.kv_heads * shape.head_dim,
                param_init={"weight": initial.normal(INIT_STD)},
            )
        return DepthCacheLink.Config(writes=writes, head_dim=shape.head_dim, feed_forward_kv=feed_forward_kv)

    def stream(self, shape: Shape) -> Stream.Config:
        return DepthCacheStream.Config()

    def layer(self, shape: Shape, layer: int, parts: dict[str, Any]) -> DepthLayer.Config:
        return MixtureOfDepthsLayer.Config(
            **parts, link=self.link(shape, layer), norm_place=self.norm, rotated_keys=self.rotated_keys
        )

    def parameters(self, shape: Shape) -> int:
        matrix = 2 * shape.width * shape.kv_heads * shape.head_dim
        return len(self._writers(shape)) * matrix if self.feed_forward_writes else 0

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """Trained and decayed as any other matrix, as in the code and in OLMo 2's recipe."""
        return (Group("feed_forward_kv", r"\.link\.feed_forward_kv\.weight$", self.parameters(shape)),)

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """4·N·H for each entry that a layer reads, N·H for scaling the sequence part of a layer that reads any,
        2·in·out for W_kv and 3·K·H for turning its key, if it is turned; three times that with the backward pass."""
        heads, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        per_writer = 2 if self.feed_forward_writes else 1
        flops = 0
        for layer in range(1, shape.layers):
            entries = per_writer * sum(writer < layer for writer in self._writers(shape))
            flops += 4 * heads * entries + heads
        if self.feed_forward_writes:
            turned = 3 * kv_width if self.rotated_keys else 0
            flops += len(self._writers(shape)) * (4 * shape.width * kv_width + turned)
        return 3 * flops


NAMED: dict[str, Variant] = {
    "moda": MixtureOfDepths(),
    "moda_pre_norm": MixtureOfDepths(
        summary="moda in pre-norm layers, as the standard model has them",
        source="Zhu et al., arXiv 2603.15619, table 6: validation loss 3.3656 against 3.3800 (48 layers, width 384)",
        norm="pre",
    ),
}
