"""Mixture-of-depths attention: each head attends to its sequence and to earlier layers' keys at the same token.

Shape suffixes: B = batch, T = tokens, D = model width, N = query heads, K = key/value heads, H = head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torchtitan.models.common import Linear

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.recipe import INIT_STD
from torchtitan_ext.sizes import Shape

from . import initial
from .connection import AttentionConnection, Connection, Stream
from .variant import Variant


class DepthCache(NamedTuple):
    """The depth state.

    Attributes:
        x_BTD: the residual stream.
        keys, values: what layers have written so far, [B, T, K, H], the oldest first.
        unrotated_BTKH: a key behind ``keys`` that is to have rotary positions and has none yet; else None.
    """

    x_BTD: torch.Tensor
    keys: tuple[torch.Tensor, ...] = ()
    values: tuple[torch.Tensor, ...] = ()
    unrotated_BTKH: torch.Tensor | None = None


Carry = tuple[DepthCache, tuple[torch.Tensor, torch.Tensor] | None]
"""The state at the start of a layer, and this layer's own key and value once they are there."""

NORMS = ("post", "pre", "reordered")
"""Where a sublayer f has its norm n: x ← n(x + f(x)), x ← x + f(n(x)), or x ← x + n(f(x))."""


def _added(
    place: str, norm: Callable[[torch.Tensor], torch.Tensor], x_BTD: torch.Tensor, y_BTD: torch.Tensor
) -> torch.Tensor:
    """The residual stream after a sublayer that gave y."""
    if place == "post":
        return norm(x_BTD + y_BTD)
    return x_BTD + (norm(y_BTD) if place == "reordered" else y_BTD)


class DepthEntries(AttentionConnection):
    """Attention that also covers the cache; with ``writes`` its keys and values are written there afterwards."""

    @dataclass(kw_only=True, slots=True)
    class Config(AttentionConnection.Config):
        writes: bool
        norm_place: str

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.writes, self.norm_place = config.writes, config.norm_place
        self.applies_norm = config.norm_place != "pre"

    def open(self, state: DepthCache) -> tuple[torch.Tensor, Carry]:
        return state.x_BTD, (state, None)

    def after_rotation(
        self,
        carry: Carry,
        q_BTNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        unrotated_BTKH: torch.Tensor,
    ) -> tuple[Carry, torch.Tensor, torch.Tensor, torch.Tensor]:
        return (carry[0], (unrotated_BTKH, v_BTKH)), q_BTNH, k_BTKH, v_BTKH

    def entries(self, carry: Carry) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        return carry[0].keys, carry[0].values

    def close(self, carry: Carry, y_BTD: torch.Tensor) -> DepthCache:
        state, own = carry
        x_BTD = _added(self.norm_place, self.norm, state.x_BTD, y_BTD)
        if not self.writes:
            return state._replace(x_BTD=x_BTD)
        assert own is not None
        return state._replace(x_BTD=x_BTD, keys=(*state.keys, own[0]), values=(*state.values, own[1]))


class RotatedEntries(DepthEntries):
    """Cached keys have rotary positions: an attention's are written with them, and the key that the feed-forward before
    has left is turned as one head more of this layer's keys."""

    @dataclass(kw_only=True, slots=True)
    class Config(DepthEntries.Config):
        pass

    def before_rotation(
        self, carry: Carry, q_BTNH: torch.Tensor, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor
    ) -> tuple[Carry, torch.Tensor, torch.Tensor, torch.Tensor]:
        left_BTKH = carry[0].unrotated_BTKH
        return carry, q_BTNH, k_BTKH if left_BTKH is None else torch.cat([k_BTKH, left_BTKH], dim=2), v_BTKH

    def after_rotation(
        self,
        carry: Carry,
        q_BTNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        unrotated_BTKH: torch.Tensor,
    ) -> tuple[Carry, torch.Tensor, torch.Tensor, torch.Tensor]:
        state, _ = carry
        if state.unrotated_BTKH is not None:
            k_BTKH, left_BTKH = k_BTKH.chunk(2, dim=2)
            state = state._replace(keys=(*state.keys, left_BTKH), unrotated_BTKH=None)
        return (state, (k_BTKH, v_BTKH)), q_BTNH, k_BTKH, v_BTKH


class FeedForwardEntries(Connection):
    """A feed-forward whose input is also made into an entry of the cache: by ``key_value``, None where it is not."""

    @dataclass(kw_only=True, slots=True)
    class Config(Connection.Config):
        norm_place: str
        rotated_keys: bool
        head_dim: int
        key_value: Linear.Config | None

    full_precision: ClassVar[bool] = False
    applies_norm = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.norm_place, self.rotated_keys, self.head_dim = config.norm_place, config.rotated_keys, config.head_dim
        self.key_value = config.key_value.build() if config.key_value is not None else None

    def open(self, state: DepthCache) -> tuple[torch.Tensor, tuple[DepthCache, torch.Tensor]]:
        h_BTD = self.norm(state.x_BTD) if self.norm_place == "pre" else state.x_BTD
        return h_BTD, (state, h_BTD)

    def close(self, carry: tuple[DepthCache, torch.Tensor], y_BTD: torch.Tensor) -> DepthCache:
        state, h_BTD = carry
        state = state._replace(x_BTD=_added(self.norm_place, self.norm, state.x_BTD, y_BTD))
        if self.key_value is None:
            return state
        # Two products with the halves of one matrix: halves of one product would be views with strides of their own,
        # which compiled code tells from the attention's keys and values.
        k_BTKH, v_BTKH = (
            F.linear(h_BTD, weight).unflatten(-1, (-1, self.head_dim)) for weight in self.key_value.weight.chunk(2)
        )
        state = state._replace(values=(*state.values, v_BTKH))
        if self.rotated_keys:
            return state._replace(unrotated_BTKH=k_BTKH)
        return state._replace(keys=(*state.keys, k_BTKH))


class DepthCacheStream(Stream):
    """An empty cache at the start; the final norm reads the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Stream.Config):
        pass

    def start(self, x_BTD: torch.Tensor) -> DepthCache:
        return DepthCache(x_BTD)

    def finish(self, state: DepthCache) -> torch.Tensor:
        return state.x_BTD


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

    def connections(self, shape: Shape, layer: int) -> tuple[Connection.Config, Connection.Config]:
        writes = layer in self._writers(shape)
        key_value = None
        if writes and self.feed_forward_writes:
            key_value = Linear.Config(
                in_features=shape.width,
                out_features=2 * shape.kv_heads * shape.head_dim,
                param_init={"weight": initial.normal(INIT_STD)},
            )
        entries = RotatedEntries if self.rotated_keys else DepthEntries
        return (
            entries.Config(writes=writes, norm_place=self.norm),
            FeedForwardEntries.Config(
                norm_place=self.norm, rotated_keys=self.rotated_keys, head_dim=shape.head_dim, key_value=key_value
            ),
        )

    def stream(self, shape: Shape) -> Stream.Config:
        return DepthCacheStream.Config()

    def parameters(self, shape: Shape) -> int:
        matrix = 2 * shape.width * shape.kv_heads * shape.head_dim
        return len(self._writers(shape)) * matrix if self.feed_forward_writes else 0

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """Trained and decayed as any other matrix, as in the code and in OLMo 2's recipe."""
        return (Group("feed_forward_kv", r"_connection\.key_value\.weight$", self.parameters(shape)),)

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
