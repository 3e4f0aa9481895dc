"""Cheap depth controls: what a few scalars do for a residual stream, as rows beside the depth variants.

Shape suffixes: B = batch, T = tokens, D = model width, K = key/value heads, H = head width.

These are controls of modded-nanogpt and nanochat. All have a state of fixed size; but for the skips they compile as
whole layers, to one graph for each role that a layer has (the first, a later one), however many layers there are. Their
scalars are one-element vectors, since FSDP shards no zero-dimensional parameters.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchtitan_ext.errors import UserError
from torchtitan_ext.sizes import Shape

from . import initial, skips
from .attention_stages import attend, project
from .decoder import DepthLayer
from .pair import Pair, PairLink, PairStream
from .state import Link, Site, Stream
from .variant import Variant

ValuePair = tuple[torch.Tensor, torch.Tensor | None]
"""The residual stream x [B, T, D], and the first layer's values [B, T, K, H] once there are any."""


# Residual scalars


class ScaledLink(PairLink):
    """x ← λ x + μ x_0 before the layer."""

    @dataclass(kw_only=True, slots=True)
    class Config(PairLink.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.residual_scale = nn.Parameter(torch.empty(1))
        self.embedding_scale = nn.Parameter(torch.empty(1))

    def read(self, state: Pair, site: Site) -> torch.Tensor:
        x_BTD, embedding_BTD = state
        if site is Site.FEED_FORWARD:
            return x_BTD
        return (self.residual_scale * x_BTD + self.embedding_scale * embedding_BTD).to(x_BTD.dtype)


@dataclass(frozen=True)
class ResidualScalars(Variant):
    """x ← λ_l x + μ_l x_0 before layer l, with x_0 the embedding and two learned scalars per layer.

    Sources: modded-nanogpt, records/track_1_short/2024-11-06_ShortcutsTweaks ("embed shortcut"; λ = 1, μ = 0 at the
    start), and nanochat, nanochat/gpt.py (there λ from 1.15 to 1.05 and μ from 0.20 to 0.05 at the start) and
    dev/LOG.md, 2026-01-11: −0.010, −0.008, −0.006 and −0.004 validation bits per byte at 8, 12, 16 and 20 layers,
    and λ wants a learning rate 100 times smaller than μ. Here both have the model's (choice), and x_0 is the
    embedding as the standard model has it, where both sources normalise it first (choice).

    With the defaults the model starts as the standard one, to the bit.
    """

    summary: str = "x ← λ x + μ x_0 before each layer, x_0 the embedding"
    source: str = "modded-nanogpt 2024-11-06; nanochat gpt.py"
    residual_start: float = 1.0
    embedding_start: float = 0.0

    def link(self, shape: Shape, layer: int) -> Link.Config:
        starts = {"residual_scale": self.residual_start, "embedding_scale": self.embedding_start}
        return ScaledLink.Config(param_init={name: initial.constant(value) for name, value in starts.items()})

    def stream(self, shape: Shape) -> Stream.Config:
        return PairStream.Config()

    def parameters(self, shape: Shape) -> int:
        return 2 * shape.layers

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Two multiplications and an addition per element and layer; three times that with the backward pass."""
        return 3 * shape.layers * 3 * shape.width


# Value residual


class ValueLink(Link):
    """V' = (1 − λ) V + λ V_1, with V_1 the first layer's values."""

    @dataclass(kw_only=True, slots=True)
    class Config(Link.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.mix = nn.Parameter(torch.empty(1)) if config.param_init is not None else None

    def values(self, v_BTKH: torch.Tensor, first_BTKH: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """This layer's values, and the first layer's for the layers to come."""
        if self.mix is None or first_BTKH is None:
            return v_BTKH, v_BTKH
        mixed_BTKH = (1 - self.mix) * v_BTKH + self.mix * first_BTKH
        return mixed_BTKH.to(v_BTKH.dtype), first_BTKH


class ValueStream(Stream):
    """There are no values at the start; the final norm reads the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Stream.Config):
        pass

    def start(self, x_BTD: torch.Tensor) -> ValuePair:
        return x_BTD, None

    def finish(self, state: ValuePair) -> torch.Tensor:
        return state[0]


class ValueResidualLayer(DepthLayer):
    """A layer over the residual stream and the first layer's values."""

    @dataclass(kw_only=True, slots=True)
    class Config(DepthLayer.Config):
        pass

    link: ValueLink

    def forward(self, state: ValuePair, attention_masks: Any, positions: torch.Tensor | None = None) -> ValuePair:
        x_BTD, first_BTKH = state
        q_BTNH, k_BTKH, v_BTKH = project(self.attention, self.attention_norm(x_BTD))
        v_BTKH, first_BTKH = self.link.values(v_BTKH, first_BTKH)
        x_BTD = x_BTD + attend(self.attention, q_BTNH, k_BTKH, v_BTKH, attention_masks, positions)
        return x_BTD + self.feed_forward_sublayer(x_BTD), first_BTKH


@dataclass(frozen=True)
class ValueResidual(Variant):
    """V'_l = (1 − λ_l) V_l + λ_l V_1 in every layer after the first, V_1 the first layer's values, λ_l learned.

    Source: Zhou et al., arXiv 2410.17897 (ResFormer: V'_l = ½ V_l + ½ V_1), with the learned λ_l of modded-nanogpt,
    records/track_1_short/2024-11-06_ShortcutsTweaks, which starts at ½. The paper reports the same validation loss
    with 16.1% fewer parameters or 20.3% fewer tokens for its best form.

    With λ = ½ at the start, later layers attend to the mean of their values and the first layer's, so the model does
    not start as the standard one; with ``start`` 0 it does, to the bit.
    """

    summary: str = "the first layer's values mixed into every later layer's"
    source: str = "Zhou et al., arXiv 2410.17897; modded-nanogpt 2024-11-06"
    start: float = 0.5

    def check(self, shape: Shape) -> None:
        if shape.layers < 2:
            raise UserError(
                "a value residual goes from the first layer to later ones; model.layers is 1, make it 2 or more"
            )

    def link(self, shape: Shape, layer: int) -> Link.Config:
        return ValueLink.Config(param_init={"mix": initial.constant(self.start)} if layer > 0 else None)

    def stream(self, shape: Shape) -> Stream.Config:
        return ValueStream.Config()

    def layer(self, shape: Shape, layer: int, parts: dict[str, Any]) -> DepthLayer.Config:
        return ValueResidualLayer.Config(**parts, link=self.link(shape, layer))

    def parameters(self, shape: Shape) -> int:
        return shape.layers - 1

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """Two multiplications and an addition per value and layer; three times that with the backward pass."""
        return 3 * (shape.layers - 1) * 3 * shape.kv_heads * shape.head_dim


NAMED: dict[str, Variant] = {
    "residual_scalars": ResidualScalars(),
    "value_residual": ValueResidual(),
    **skips.NAMED,
}
