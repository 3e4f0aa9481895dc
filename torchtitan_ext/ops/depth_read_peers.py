"""The depth read by the field's own packages, for reads that they know: one query vector and plain softmax.

fla is flash-linear-attention 0.6.0 (``fla.ops.attnres``), attnres is fast-attnres 2.1.0, flash_attn_res is
flash-attn-res 0.1.12. All three compute h = Σ α_i v_i with logit_i = ⟨w, RMSNorm(v_i)⟩ in fp32, on CUDA alone. They are
imported when asked for.
"""

from collections.abc import Sequence

import torch

from .depth_query import DepthQuery


def flash_linear_attention(sources: Sequence[torch.Tensor], query: DepthQuery) -> torch.Tensor:
    """Sources stay where they are; backward reads them once more to have ⟨g, h⟩."""
    from fla.ops.attnres import fused_attnres

    w_K = query.w_nK[0]
    return fused_attnres(w_K, sources, torch.ones_like(w_K), rms_eps=query.eps)


def fast_attnres(sources: Sequence[torch.Tensor], query: DepthQuery) -> torch.Tensor:
    """Takes w in bf16 alone: it and its gradient are rounded."""
    from attnres import attnres

    return attnres(list(sources), query.w_nK[0].to(torch.bfloat16), eps=query.eps)


def flash_attn_res(sources: Sequence[torch.Tensor], query: DepthQuery) -> torch.Tensor:
    """Takes sources stacked, so they are copied first."""
    from flash_attn_res import phase_1_batched_attention_triton_op

    h_1BTD, _ = phase_1_batched_attention_triton_op(torch.stack(list(sources)), query.w_nK[:1].contiguous(), query.eps)
    return h_1BTD[0]
