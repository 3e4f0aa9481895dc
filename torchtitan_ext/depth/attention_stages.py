"""torchtitan's grouped-query attention in stages, for the variants that act between its projections and its softmax.

Shape suffixes: B = batch, T = tokens, D = model width, N = query heads, K = key/value heads, H = head width.

``attend(attention, *project(attention, x), masks, positions)`` is ``attention(x, masks, positions)``, to the bit.
The stages are functions of the attention module, so that its class, its parameters' names and its sharding stay
torchtitan's.
"""

from typing import Any

import torch
from torchtitan.models.common.attention import GQAttention


def project(attention: GQAttention, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [B, T, N, H], keys and values [B, T, K, H] before rotary positions."""
    q_BTNH, k_BTKH, v_BTKH = attention.qkv_linear(x_BTD)
    if attention.q_norm is not None and attention.k_norm is not None:
        q_BTNH, k_BTKH = attention.q_norm(q_BTNH), attention.k_norm(k_BTKH)
    return q_BTNH, k_BTKH, v_BTKH


def attend(
    attention: GQAttention,
    q_BTNH: torch.Tensor,
    k_BTKH: torch.Tensor,
    v_BTKH: torch.Tensor,
    attention_masks: Any,
    positions_BT: torch.Tensor | None,
) -> torch.Tensor:
    """Rotary positions, softmax and output projection of what ``project`` gave, [B, T, D]."""
    q_BTNH, k_BTKH = attention.rope(q_BTNH, k_BTKH, positions_BT)
    return output(attention, over_sequence(attention, q_BTNH, k_BTKH, v_BTKH, attention_masks))


def over_sequence(
    attention: GQAttention, q_BTNH: torch.Tensor, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor, attention_masks: Any
) -> torch.Tensor:
    """The softmax over the sequence for rotated queries and keys, [B, T, N, H]."""
    return attention.inner_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        attention_masks=attention_masks,
        scale=attention.scaling,
        enable_gqa=attention.enable_gqa,
    )


def output(attention: GQAttention, heads_BTNH: torch.Tensor) -> torch.Tensor:
    """The output projection of the heads, [B, T, D]."""
    return attention.wo(heads_BTNH.contiguous().flatten(2))
