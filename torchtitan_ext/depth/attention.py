"""The inner attention: fused causal attention of PyTorch, with or without document masks.

Shape suffixes: B = batch, T = tokens, N = heads, H = head width.

torchtitan offers language models FlexAttention and varlen attention only, and neither trains on a CPU. Without document
masks plain causal attention is all a window needs, and ``scaled_dot_product_attention`` picks the fastest kernel there
is (cuDNN or flash on a GPU). With them, GPUs use torchtitan's FlexAttention and CPUs the explicit mask below.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.protocols.module import Module


class FusedAttention(Module):
    """``softmax(q kᵀ · scale) v`` over earlier tokens, or over those that ``attention_masks`` [B, 1, T, T] (bool)
    allows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: torch.Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return [B, T, N, H]. The argument names are those of torchtitan's inner attentions (L stands for T there)."""
        out_BNTH = F.scaled_dot_product_attention(
            q_BLNH.transpose(1, 2),
            k_BLNH.transpose(1, 2),
            v_BLNH.transpose(1, 2),
            attn_mask=attention_masks,
            is_causal=attention_masks is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_BNTH.transpose(1, 2)


def document_mask(positions_BT: torch.Tensor) -> torch.Tensor:
    """Which tokens each token may attend to, [B, 1, T, T]: earlier ones of its own document.

    A document starts where ``positions`` is 0.
    """
    document_BT = (positions_BT == 0).cumsum(dim=1)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return same_BTT.tril().unsqueeze(1)
