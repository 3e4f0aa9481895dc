"""What a depth read is: softmax attention of one learned query over what earlier layers left behind, token by token.

Shape suffixes: B = batch, T = tokens, D = model width, K = key width (keys are the last K of the D coordinates), R =
rank of the token-dependent part of the query, n = sources.

For every token, with sources v_0 … v_(n-1)::

    k_i = s_i v_i[-K:]
    logit_i = ⟨w_i + Σ_r c_r u_ir, k_i⟩ · (mean(k_i²) + eps)^(-1/2) + bias_i
    α = softmax_i(logit)        h = Σ_i α_i s_i v_i

With w_i = q ⊙ γ this is attention with the query q and the keys RMSNorm(v_i) ⊙ γ (Kimi Team, arXiv 2603.15031,
section 3). A query that turns with the depth index, a gain per source, a mean in place of a sum (s_i = 1 / count) and
a bias by distance are choices of w, s and bias: the sources stay as they are.

Softmax, mean squares and sums are in fp32, or in fp64 for fp64 sources; the result has the sources' type.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

EPS = 1e-6
"""Added to a source's mean square; small beside 4e-4, that of an embedding drawn with standard deviation 0.02."""


class Found(NamedTuple):
    """What a query finds in some of its sources: their weighted mean and the log of the sum of their exponentials.

    Attributes:
        h_BTD, lse_BT: in fp32, or in fp64 for fp64 sources: rounding comes after the second phase.
    """

    h_BTD: torch.Tensor
    lse_BT: torch.Tensor


@dataclass(frozen=True, eq=False)
class DepthQuery:
    """What one read asks for: everything but the sources.

    Attributes:
        w_nK: a vector per source, query times key gain, or one expanded over the sources; K may be less than the
            sources' width.
        scales: s_i; None for ones.
        biases: bias_i; None for zeros.
        basis_nRK, coefficients_BTR: u and c of the token-dependent part of the query; both or neither.
        eps: added to the mean square.
    """

    w_nK: torch.Tensor
    scales: Sequence[float] | None = None
    biases: Sequence[float] | None = None
    basis_nRK: torch.Tensor | None = None
    coefficients_BTR: torch.Tensor | None = None
    eps: float = EPS

    def of(self, which: slice) -> "DepthQuery":
        """The same query, put to some of the sources."""
        return replace(
            self,
            w_nK=self.w_nK[which],
            scales=self.scales[which] if self.scales else None,
            biases=self.biases[which] if self.biases else None,
            basis_nRK=self.basis_nRK[which] if self.basis_nRK is not None else None,
        )


def depth_read_reference(
    sources: Sequence[torch.Tensor], query: DepthQuery, before: Found | None = None
) -> torch.Tensor:
    """The depth read [B, T, D] of sources [B, T, D], as the formula has it, in plain autograd.

    ``before``: what the same query found in other sources, taken in as if they were here.
    """
    v_nBTD, logit_nBT = _weigh(sources, query)
    if before is not None:
        v_nBTD = torch.cat([before.h_BTD.unsqueeze(0), v_nBTD])
        logit_nBT = torch.cat([before.lse_BT.unsqueeze(0), logit_nBT])
    return (logit_nBT.softmax(0).unsqueeze(-1) * v_nBTD).sum(0).to(sources[0].dtype)


def find_reference(sources: Sequence[torch.Tensor], query: DepthQuery) -> Found:
    """What the query finds in these sources, as the formula has it, in plain autograd."""
    v_nBTD, logit_nBT = _weigh(sources, query)
    h_BTD = (logit_nBT.softmax(0).unsqueeze(-1) * v_nBTD).sum(0)
    return Found(h_BTD, logit_nBT.logsumexp(0))


def depth_weights(sources: Sequence[torch.Tensor], query: DepthQuery) -> torch.Tensor:
    """The weights α [B, T, n] that a depth read gives the sources, without gradient, for looking at."""
    with torch.no_grad():
        return _weigh(sources, query)[1].softmax(0).movedim(0, -1)


def accumulation_dtype(source: torch.Tensor) -> torch.dtype:
    return torch.float64 if source.dtype == torch.float64 else torch.float32


def columns(
    n: int, scales: Sequence[float] | None, biases: Sequence[Sequence[float] | None], like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [n, 1], and the biases of G queries [G, n, 1], with the type and device of ``like``."""
    rows = torch.tensor([scales or [1.0] * n, *(row or [0.0] * n for row in biases)], dtype=like.dtype)
    # Not waiting is safe, for the source is pageable memory, and spares the device a stop at every read.
    rows_n1 = rows.unsqueeze(-1).to(like.device, non_blocking=True)
    return rows_n1[0], rows_n1[1:]


def _weigh(sources: Sequence[torch.Tensor], query: DepthQuery) -> tuple[torch.Tensor, torch.Tensor]:
    """The scaled sources [n, B, T, D] and their logits [n, B, T]."""
    v_nBTD = torch.stack(list(sources)).to(accumulation_dtype(sources[0]))
    scale_n1, (bias_n1,) = columns(len(v_nBTD), query.scales, [query.biases], v_nBTD)
    v_nBTD = v_nBTD * scale_n1[..., None, None]
    k_nBTK = v_nBTD[..., -query.w_nK.shape[-1] :]
    q_nBTK = query.w_nK.to(v_nBTD.dtype)[:, None, None]
    if query.basis_nRK is not None and query.coefficients_BTR is not None:
        c_BTR, u_nRK = query.coefficients_BTR.to(v_nBTD.dtype), query.basis_nRK.to(v_nBTD.dtype)
        q_nBTK = q_nBTK + torch.einsum("btr,nrk->nbtk", c_BTR, u_nRK)
    inverse_rms_nBT = (k_nBTK.square().mean(-1) + query.eps).rsqrt()
    return v_nBTD, (q_nBTK * k_nBTK).sum(-1) * inverse_rms_nBT + bias_n1[..., None]
