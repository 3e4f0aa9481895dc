"""The renewal of a gated state as one operation.

Shape suffixes: B = batch, T = tokens, D = width.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def gated_update(z_BT2D: torch.Tensor, m_BTD: torch.Tensor) -> torch.Tensor:
    """M ← g ⊙ M + (1 − g) ⊙ c with g = σ(z[:D]) and c = tanh(z[D:]), [B, T, D]; differentiable once.

    Plain autograd would keep g, 1 − g and c for backward; here only z is, and M, which a reader of M keeps anyway.
    Inside a compiled graph the plain form takes over, for there the compiler does the fusing.
    """
    if torch.compiler.is_compiling():
        g_BTD, c_BTD = _gate(z_BT2D)
        return torch.lerp(c_BTD, m_BTD, g_BTD)
    return _GatedUpdate.apply(z_BT2D, m_BTD)


def _gate(z_BT2D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    open_BTD, candidate_BTD = z_BT2D.chunk(2, dim=-1)
    return torch.sigmoid(open_BTD), torch.tanh(candidate_BTD)


class _GatedUpdate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_BT2D: torch.Tensor, m_BTD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z_BT2D, m_BTD)
        g_BTD, c_BTD = _gate(z_BT2D)
        return torch.lerp(c_BTD, m_BTD, g_BTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        z_BT2D, m_BTD = ctx.saved_tensors
        g_BTD, c_BTD = _gate(z_BT2D)
        d_z_BT2D = torch.empty_like(z_BT2D)
        d_open_BTD, d_candidate_BTD = d_z_BT2D.chunk(2, dim=-1)
        d_m_BTD = grad_BTD * g_BTD
        kept_BTD = grad_BTD - d_m_BTD  # ∂L/∂c = (1 − g) ∂L/∂M
        torch.mul((m_BTD - c_BTD).mul_(g_BTD), kept_BTD, out=d_open_BTD)
        torch.addcmul(kept_BTD, kept_BTD * c_BTD, c_BTD, value=-1, out=d_candidate_BTD)
        return d_z_BT2D, d_m_BTD if ctx.needs_input_grad[1] else None
