"""What may change inside attention, beside the variant of the residual connection: every attention by name.

Shape suffixes: B = batch, T = tokens, D = model width, N = query heads, H = head width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torchtitan.models.common import Linear, RMSNorm

from torchtitan_ext.errors import UserError, nearest
from torchtitan_ext.parameter_groups import Group
from torchtitan_ext.recipe import INIT_STD
from torchtitan_ext.sizes import Shape

from . import initial
from .declaration import Declaration
from .staged_attention import StagedAttention

QK_NORM_EPS = 1e-6
"""That of Qwen3, in torchtitan (``models/qwen3``) and in its authors' code."""


@dataclass(frozen=True)
class Attention(Declaration):
    """A form of attention; this base class is Llama 3's grouped-query attention.

    A subclass overrides ``config`` to change what is built in each layer, and counts what that adds.
    """

    kind: ClassVar[str] = "attention"
    section: ClassVar[str] = "attention"

    summary: str = "grouped-query attention with rotary positions, as in Llama 3"
    source: str = "Ainslie et al., arXiv 2305.13245; torchtitan models/llama3"

    def config(self, standard: StagedAttention.Config, shape: Shape) -> StagedAttention.Config:
        """The attention of a layer, from that of the standard model."""
        return standard


@dataclass(frozen=True)
class NormedAttention(Attention):
    """Attention whose queries and keys may go through an RMSNorm over each head, before rotary positions.

    Options:
        qk_norm: whether they do.
    """

    summary: str = "queries and keys go through an RMSNorm over each head, before rotary positions"
    source: str = "Henry et al., arXiv 2010.04245; here as in Qwen3 (arXiv 2505.09388; torchtitan models/qwen3)"
    qk_norm: bool = True

    def config(self, standard: StagedAttention.Config, shape: Shape) -> StagedAttention.Config:
        if not self.qk_norm:
            return standard
        norm = RMSNorm.Config(normalized_shape=shape.head_dim, eps=QK_NORM_EPS, param_init={"weight": initial.ones})
        return StagedAttention.config_of(standard, qk_norm=norm)

    def parameters(self, shape: Shape) -> int:
        return self._norms(shape)

    def _norms(self, shape: Shape) -> int:
        """The gains of all layers: one vector for all query heads, one for all key heads."""
        return 2 * shape.layers * shape.head_dim * self.qk_norm

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        """Gains are not decayed, as those of the other norms."""
        return (Group("qk_norms", r"\.attention\.[qk]_norm\.", self._norms(shape), weight_decay=0.0),)

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """As for the standard model's norms, which torchtitan counts by their parameters: 6 for each."""
        return 6 * self._norms(shape)


class OutputGate(StagedAttention):
    """Attention whose heads are multiplied with a sigmoid gate before the output projection (arXiv 2505.06708, section
    2.2, position G1): y = W_o (Attention(q, k, v) ⊙ σ(W_g h)), h the input of the projection of the queries."""

    @dataclass(kw_only=True, slots=True)
    class Config(StagedAttention.Config):
        gate: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gate = config.gate.build()

    def gates(self, h_BTD: torch.Tensor) -> torch.Tensor:
        """σ(W_g h), [B, T, N, H], or [B, T, N, 1] where a head has one gate."""
        return torch.sigmoid(self.gate(h_BTD)).unflatten(-1, (self.n_heads, -1))


@dataclass(frozen=True)
class GatedAttention(NormedAttention):
    """A sigmoid gate on the output of each head.

    The authors' code has the gate's rows in the projection of the queries, so its matrix starts, decays and learns as
    that does; and it norms queries and keys by default.

    Options:
        elementwise: a gate for each element of a head; else one for each head.
        qk_norm: as in ``qk_norm``.
    """

    summary: str = "qk_norm, and a sigmoid gate on each element of the heads' outputs"
    source: str = "Qiu et al., arXiv 2505.06708, G1 (github.com/qiuzh20/gated_attention)"
    elementwise: bool = True

    def config(self, standard: StagedAttention.Config, shape: Shape) -> StagedAttention.Config:
        gate = Linear.Config(
            in_features=shape.width,
            out_features=self._gates(shape),
            param_init={"weight": initial.normal(INIT_STD)},
        )
        return OutputGate.config_of(super().config(standard, shape), gate=gate)

    def _gates(self, shape: Shape) -> int:
        """Gates in a layer."""
        return shape.heads * (shape.head_dim if self.elementwise else 1)

    def parameters(self, shape: Shape) -> int:
        return self._norms(shape) + shape.layers * shape.width * self._gates(shape)

    def groups(self, shape: Shape) -> tuple[Group, ...]:
        matrices = shape.layers * shape.width * self._gates(shape)
        return (*super().groups(shape), Group("attention_gates", r"\.attention\.gate\.", matrices))

    def flops_per_token(self, shape: Shape, seq_len: int) -> int:
        """6 for each weight, and for the sigmoid and the product one per element forward and two backward."""
        elementwise = 3 * shape.layers * (self._gates(shape) + shape.width)
        return 6 * self.parameters(shape) + elementwise


ATTENTIONS: Mapping[str, Attention] = {
    "standard": Attention(),
    "qk_norm": NormedAttention(),
    "gate_elementwise": GatedAttention(),
    "gate_headwise": GatedAttention(summary="qk_norm, and a sigmoid gate on each head's output", elementwise=False),
}


def attention_of(name: str) -> Attention:
    """The attention called ``name``; raises ``UserError`` with the nearest name for an unknown one."""
    if name not in ATTENTIONS:
        raise UserError(f"model.attention {name!r} is unknown; {nearest(name, ATTENTIONS)}")
    return ATTENTIONS[name]
