"""torchtitan's grouped-query attention in stages, with places where a connection may act.

Shape suffixes: B = batch, T = tokens, D = model width, N = query heads, K = key/value heads, H = head width.

Parameters' names and sharding stay torchtitan's. Called as a whole it computes what ``GQAttention`` does; the stages,
one after the other, compute the same to the bit.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FlexAttention, FusedQKVLinear, GQAttention

from torchtitan_ext.ops import moda

from .connection import QKV, AttentionConnection, State, SublayerInput
from .observe import note


class Projected(NamedTuple):
    """What attention makes of its input.

    Attributes:
        qkv: queries [B, T, N, H], keys and values [B, T, K, H], normed where the attention norms them.
        raw_k_BTKH: the keys before that norm; None without one.
        gates_BTNH: factors on the heads' output, [B, T, N, H] or [B, T, N, 1]; None without gates.
    """

    qkv: QKV
    raw_k_BTKH: torch.Tensor | None
    gates_BTNH: torch.Tensor | None


class Rotated(NamedTuple):
    """``qkv``, queries and keys with rotary positions; the keys without these and without norm; and the gates."""

    qkv: QKV
    unrotated_BTKH: torch.Tensor
    gates_BTNH: torch.Tensor | None


class StagedAttention(GQAttention):
    """Grouped-query attention over the sequence and, where a connection gives any, over further entries."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    kernels = ("depth_forward", "depth_backward")
    """Functions to be compiled, which run where no gradient is recorded: on a chunk of a connection's entries."""
    depth_forward = staticmethod(moda.depth_forward)
    depth_backward = staticmethod(moda.depth_backward)

    @classmethod
    def config_of(cls, attention: GQAttention.Config, **own: Any) -> "StagedAttention.Config":
        """The configuration of ``attention`` as one of this class, with its ``own`` fields."""
        return cls.Config(**{field.name: getattr(attention, field.name) for field in fields(attention)} | own)

    def forward(self, x: SublayerInput, attention_masks: Any, positions_BT: torch.Tensor | None = None) -> torch.Tensor:
        """Attention over the sequence, [B, T, D]."""
        rotated = self.project_and_rotate(x, positions_BT)
        return self.output(self.over_sequence(*rotated.qkv, attention_masks), rotated.gates_BTNH)

    def gates(self, h_BTD: torch.Tensor) -> torch.Tensor | None:
        """Factors on the heads' output, [B, T, N, H] or [B, T, N, 1], from the input of the queries' projection."""
        return None

    def project(self, x: SublayerInput) -> Projected:
        """Queries, keys and values before rotary positions, and the gates."""
        apart = isinstance(x, QKV)
        q_BTNH, k_BTKH, v_BTKH = self._project_apart(x) if apart else self.qkv_linear(x)
        raw_k_BTKH = None
        if self.q_norm is not None and self.k_norm is not None:
            raw_k_BTKH = k_BTKH
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        return Projected(QKV(q_BTNH, k_BTKH, v_BTKH), raw_k_BTKH, self.gates(x.q if apart else x))

    def _project_apart(self, x: QKV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        linear = self.qkv_linear
        if not isinstance(linear, FusedQKVLinear):
            parts = [(one.weight, one.bias) for one in (linear.wq, linear.wk, linear.wv)]
        else:
            weights = self._of_a_key_head(linear.wqkv.weight)
            biases = (None,) * 3 if linear.wqkv.bias is None else self._of_a_key_head(linear.wqkv.bias)
            parts = list(zip(weights, biases, strict=True))
        q_BTNH, k_BTKH, v_BTKH = (
            F.linear(x_BTD, weight, bias).unflatten(-1, (-1, self.head_dim))
            for x_BTD, (weight, bias) in zip(x, parts, strict=True)
        )
        return q_BTNH, k_BTKH, v_BTKH

    def _of_a_key_head(self, fused: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of queries, keys and values: those of a key head are its queries, its key, its value."""
        linear = self.qkv_linear
        rows = fused.unflatten(0, (-1, linear.r_dim, self.head_dim))
        return tuple(part.flatten(0, 2) for part in rows.split([linear.heads_per_kv, 1, 1], dim=1))

    def rotate(self, projected: Projected, positions_BT: torch.Tensor | None) -> Rotated:
        q_BTNH, k_BTKH, v_BTKH = projected.qkv
        q_BTNH, rotated_BTKH = self.rope(q_BTNH, k_BTKH, positions_BT)
        unrotated_BTKH = k_BTKH if projected.raw_k_BTKH is None else projected.raw_k_BTKH
        return Rotated(QKV(q_BTNH, rotated_BTKH, v_BTKH), unrotated_BTKH, projected.gates_BTNH)

    def project_and_rotate(self, x: SublayerInput, positions_BT: torch.Tensor | None) -> Rotated:
        return self.rotate(self.project(x), positions_BT)

    def over_sequence(
        self, q_BTNH: torch.Tensor, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor, attention_masks: Any
    ) -> torch.Tensor:
        """The softmax over the sequence for rotated queries and keys, [B, T, N, H]."""
        return self.inner_attention(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            attention_masks=attention_masks,
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
        )

    def over_both(
        self,
        q_BTNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        keys: tuple[torch.Tensor, ...],
        values: tuple[torch.Tensor, ...],
        attention_masks: Any,
    ) -> torch.Tensor:
        """One softmax over the sequence and the entries at each token, [B, T, N, H]."""
        kernels = moda.DepthKernels(self.depth_forward, self.depth_backward)
        if isinstance(self.inner_attention, FlexAttention):
            return self.inner_attention(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                attention_masks=attention_masks,
                scale=self.scaling,
                enable_gqa=self.enable_gqa,
                out_transform=lambda out_BTNH, lse_BTN: moda.join_depth(
                    out_BTNH, lse_BTN, q_BTNH, keys, values, scale=self.scaling, kernels=kernels
                ),
            )
        return moda.attend_with_depth(
            q_BTNH, k_BTKH, v_BTKH, keys, values, allowed=attention_masks, scale=self.scaling, kernels=kernels
        )

    def attend(
        self,
        connection: AttentionConnection,
        carry: State,
        q_BTNH: torch.Tensor,
        k_BTKH: torch.Tensor,
        v_BTKH: torch.Tensor,
        attention_masks: Any,
    ) -> torch.Tensor:
        """The softmax over the sequence and over the connection's entries, if there are any, [B, T, N, H]."""
        keys, values = connection.entries(carry)
        if not keys:
            return self.over_sequence(q_BTNH, k_BTKH, v_BTKH, attention_masks)

        def mass() -> torch.Tensor:
            # What attention gives where the values of the sequence are 0 and those of the entries are 1.
            zeros, ones = torch.zeros_like(k_BTKH), tuple(torch.ones_like(key) for key in keys)
            return self.over_both(q_BTNH, k_BTKH, zeros, keys, ones, attention_masks).float().mean()

        note("depth_key_mass", mass)
        return self.over_both(q_BTNH, k_BTKH, v_BTKH, keys, values, attention_masks)

    def output(self, heads_BTNH: torch.Tensor, gates_BTNH: torch.Tensor | None) -> torch.Tensor:
        """The output projection of the heads, after their gates if there are any, [B, T, D]."""
        if gates_BTNH is not None:
            heads_BTNH = heads_BTNH * gates_BTNH
        return self.wo(heads_BTNH.contiguous().flatten(2))
