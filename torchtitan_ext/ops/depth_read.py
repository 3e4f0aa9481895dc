"""The depth read: softmax attention of one learned query over what earlier layers left behind, token by token.

Shape suffixes: B = batch, T = tokens, N = B·T tokens, C = tokens of one chunk, D = model width, K = key width (keys
are the last K of the D coordinates), R = rank of the token-dependent part of the query, n = sources.

For every token, with sources v_0 … v_(n-1)::

    k_i = s_i v_i[-K:]
    logit_i = ⟨w_i + Σ_r c_r u_ir, k_i⟩ · (mean(k_i²) + eps)^(-1/2) + bias_i
    α = softmax_i(logit)        h = Σ_i α_i s_i v_i

With w_i = q ⊙ γ this is attention with the query q and the keys RMSNorm(v_i) ⊙ γ (Kimi Team, arXiv 2603.15031,
section 3). A query that turns with the depth index, a gain per source, a mean in place of a sum (s_i = 1 / count) and
a bias by distance are choices of w, s and bias: the sources stay as they are.

``depth_read_reference`` is the definition, in plain autograd. ``depth_read`` computes the same without stacking the
sources. For backward it keeps references to them, two numbers per source and token (logit and inverse RMS) and one
per token (the log-sum-exp). What costs time here is moving the sources through memory, not arithmetic, so both passes
walk through the tokens in chunks: while a chunk of every source is in cache, first the weights are made from it and
then the sum.

Softmax, mean squares and sums are in fp32, or in fp64 for fp64 sources; the result has the sources' type.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

EPS = 1e-6
"""Added to a source's mean square; small beside 4e-4, that of an embedding drawn with standard deviation 0.02."""

_CPU_CHUNK_ELEMENTS = 1024 * 1024
"""Elements of one source in a chunk, for each CPU thread. Four MiB in fp32: small for the cache that cores share, large
beside the cost of starting an operation on several threads, which on a busy machine is a time slice."""
_DEVICE_CHUNK_ELEMENTS = 32 * 1024 * 1024
"""The same on a GPU, where a chunk bounds the temporary copies in fp32."""


@dataclass(frozen=True, eq=False)
class DepthQuery:
    """What one read asks for: everything but the sources.

    Attributes:
        w_nK: a vector per source, query times key gain; K may be less than the sources' width.
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

    def columns(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and biases as [n, 1] tensors with the type and device of ``like``."""
        n = len(self.w_nK)
        both = torch.tensor([self.scales or [1.0] * n, self.biases or [0.0] * n], dtype=like.dtype)
        # Not waiting is safe, for the source is pageable memory, and spares the device a stop at every read.
        scale_n1, bias_n1 = both.unsqueeze(-1).to(like.device, non_blocking=True)
        return scale_n1, bias_n1


def depth_read_reference(sources: Sequence[torch.Tensor], query: DepthQuery) -> torch.Tensor:
    """The depth read [B, T, D] of sources [B, T, D], as the formula has it."""
    v_nBTD, alpha_nBT = _weigh(sources, query)
    return (alpha_nBT.unsqueeze(-1) * v_nBTD).sum(0).to(sources[0].dtype)


def depth_weights(sources: Sequence[torch.Tensor], query: DepthQuery) -> torch.Tensor:
    """The weights α [B, T, n] that ``depth_read`` gives the sources, without gradient, for looking at."""
    with torch.no_grad():
        return _weigh(sources, query)[1].movedim(0, -1)


def depth_read(sources: Sequence[torch.Tensor], query: DepthQuery) -> torch.Tensor:
    """The depth read [B, T, D] of sources [B, T, D].

    Differentiable once, in the sources and in the query's tensors. Inside a compiled graph the definition takes over,
    for there the compiler does the fusing.
    """
    if torch.compiler.is_compiling():
        return depth_read_reference(sources, query)
    static = (query.scales, query.biases, query.eps)
    return _DepthRead.apply(static, query.w_nK, query.basis_nRK, query.coefficients_BTR, *sources)


def _weigh(sources: Sequence[torch.Tensor], query: DepthQuery) -> tuple[torch.Tensor, torch.Tensor]:
    """The scaled sources [n, B, T, D] and their weights [n, B, T]."""
    v_nBTD = torch.stack(list(sources)).to(_accumulation_dtype(sources[0]))
    scale_n1, bias_n1 = query.columns(v_nBTD)
    v_nBTD = v_nBTD * scale_n1[..., None, None]
    k_nBTK = v_nBTD[..., -query.w_nK.shape[-1] :]
    q_nBTK = query.w_nK.to(v_nBTD.dtype)[:, None, None]
    if query.basis_nRK is not None and query.coefficients_BTR is not None:
        c_BTR, u_nRK = query.coefficients_BTR.to(v_nBTD.dtype), query.basis_nRK.to(v_nBTD.dtype)
        q_nBTK = q_nBTK + torch.einsum("btr,nrk->nbtk", c_BTR, u_nRK)
    inverse_rms_nBT = (k_nBTK.square().mean(-1) + query.eps).rsqrt()
    logit_nBT = (q_nBTK * k_nBTK).sum(-1) * inverse_rms_nBT + bias_n1[..., None]
    return v_nBTD, logit_nBT.softmax(0)


def _accumulation_dtype(source: torch.Tensor) -> torch.dtype:
    return torch.float64 if source.dtype == torch.float64 else torch.float32


def _split(tensor_BTD: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [C, D] of a tensor [B, T, D] (or copies, where its strides allow no view), chunk by chunk."""
    tensor_ND = tensor_BTD.reshape(-1, tensor_BTD.shape[-1])
    on_cpu = tensor_BTD.device.type == "cpu"
    elements = _CPU_CHUNK_ELEMENTS * torch.get_num_threads() if on_cpu else _DEVICE_CHUNK_ELEMENTS
    return tensor_ND.split(max(1, elements // tensor_ND.shape[-1]))


def _keys(v_CD: torch.Tensor, key_width: int) -> torch.Tensor:
    return v_CD if v_CD.shape[-1] == key_width else v_CD[:, -key_width:]


class _DepthRead(torch.autograd.Function):
    """``depth_read`` with its derivative written out.

    With g = dL/dh, β_i = dL/dα_i = s_i ⟨g, v_i⟩, δ_i = dL/dlogit_i = α_i (β_i − Σ_j α_j β_j), r_i the inverse RMS of
    k_i, l_i the logit without its bias, and m_i = δ_i s_i r_i::

        dL/dv_i = α_i s_i g + [last K] ( m_i (w_i + Σ_r c_r u_ir) − δ_i l_i (s_i r_i)² v_i / K )
        dL/dw_i = Σ_tokens m_i v_i[-K:]
        dL/du_ir = Σ_tokens c_r m_i v_i[-K:]
        dL/dc_r = Σ_i m_i ⟨u_ir, v_i[-K:]⟩
    """

    @staticmethod
    def forward(
        ctx: Any,
        static: tuple[Sequence[float] | None, Sequence[float] | None, float],
        w_nK: torch.Tensor,
        basis_nRK: torch.Tensor | None,
        coefficients_BTR: torch.Tensor | None,
        *sources: torch.Tensor,
    ) -> torch.Tensor:
        query = DepthQuery(w_nK, static[0], static[1], basis_nRK, coefficients_BTR, static[2])
        dtype = _accumulation_dtype(sources[0])
        n, key_width = w_nK.shape
        h_BTD = torch.empty_like(sources[0], memory_format=torch.contiguous_format)
        tokens = h_BTD.numel() // h_BTD.shape[-1]
        logit_nN = h_BTD.new_empty(n, tokens, dtype=dtype)
        inverse_rms_nN = torch.empty_like(logit_nN)
        lse_N = torch.empty_like(logit_nN[0])
        w_nK = w_nK.to(dtype)
        low_rank = _LowRank.of(query, dtype)
        scale_n1, bias_n1 = query.columns(logit_nN)

        start = 0
        for out_CD, *v_nCD in zip(*map(_split, (h_BTD, *sources)), strict=True):
            span = slice(start, start := start + len(out_CD))
            dot_nC, rms_nC = logit_nN[:, span], inverse_rms_nN[:, span]
            for i, (v_CD, w_K, dot_C, rms_C) in enumerate(zip(v_nCD, w_nK, dot_nC, rms_nC, strict=True)):
                k_CK = _keys(v_CD, key_width).to(dtype)
                torch.mv(k_CK, w_K, out=dot_C)
                if low_rank is not None:
                    dot_C += (low_rank.dots(i, k_CK) * low_rank.c_NR[span]).sum(-1)
                torch.linalg.vector_norm(_keys(v_CD, key_width), dim=-1, dtype=dtype, out=rms_C)
            rms_nC.mul_(scale_n1).square_().div_(key_width).add_(query.eps).rsqrt_()
            dot_nC.mul_(scale_n1).mul_(rms_nC)
            biased_nC = dot_nC + bias_n1
            lse_C = torch.logsumexp(biased_nC, 0, out=lse_N[span])
            share_nC1 = ((biased_nC - lse_C).exp_() * scale_n1).unsqueeze(-1).unbind()
            sum_CD = out_CD if out_CD.dtype == dtype else torch.empty_like(out_CD, dtype=dtype)
            torch.mul(v_nCD[0], share_nC1[0], out=sum_CD)
            for v_CD, share_C1 in zip(v_nCD[1:], share_nC1[1:], strict=True):
                sum_CD.addcmul_(v_CD, share_C1)
            if sum_CD is not out_CD:
                out_CD.copy_(sum_CD)

        ctx.static = static
        ctx.save_for_backward(query.w_nK, basis_nRK, coefficients_BTR, logit_nN, inverse_rms_nN, lse_N, *sources)
        return h_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: torch.Tensor) -> tuple[Any, ...]:
        given_w_nK, basis_nRK, coefficients_BTR, logit_nN, inverse_rms_nN, lse_N, *sources = ctx.saved_tensors
        query = DepthQuery(given_w_nK, ctx.static[0], ctx.static[1], basis_nRK, coefficients_BTR, ctx.static[2])
        dtype = logit_nN.dtype
        n, key_width = given_w_nK.shape
        w_nK = given_w_nK.to(dtype)
        low_rank = _LowRank.of(query, dtype)
        scale_n1, bias_n1 = query.columns(logit_nN)
        d_w_nK = torch.zeros_like(w_nK)
        d_sources = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]

        start = 0
        for g_CD, *chunks in zip(*map(_split, (grad_BTD, *sources, *d_sources)), strict=True):
            g_CD, v_nCD, d_nCD = g_CD.to(dtype), chunks[:n], chunks[n:]
            span = slice(start, start := start + len(g_CD))
            logit_nC, rms_nC = logit_nN[:, span], inverse_rms_nN[:, span]
            work_CD = torch.empty_like(g_CD)
            beta_nC = torch.empty_like(logit_nC)
            for v_CD, beta_C in zip(v_nCD, beta_nC, strict=True):
                torch.sum(torch.mul(g_CD, v_CD, out=work_CD), -1, out=beta_C)
            alpha_nC = (logit_nC + bias_n1).sub_(lse_N[span]).exp_()
            beta_nC.mul_(scale_n1)
            delta_nC = (beta_nC - (alpha_nC * beta_nC).sum(0)).mul_(alpha_nC)
            scaled_rms_nC = rms_nC * scale_n1
            m_nC = delta_nC * scaled_rms_nC
            pull_nC1 = (m_nC * scaled_rms_nC).mul_(logit_nC).div_(-key_width).unsqueeze(-1)
            share_nC1 = alpha_nC.mul_(scale_n1).unsqueeze(-1)
            rows = zip(v_nCD, d_nCD, w_nK, d_w_nK, share_nC1, pull_nC1, m_nC, strict=True)
            for i, (v_CD, target_CD, w_K, d_w_K, share_C1, pull_C1, m_C) in enumerate(rows):
                k_CK = _keys(v_CD, key_width).to(dtype)
                d_CD = target_CD if target_CD.dtype == dtype else work_CD
                d_k_CK = _keys(torch.mul(g_CD, share_C1, out=d_CD), key_width)
                d_k_CK.addcmul_(k_CK, pull_C1).addr_(m_C, w_K)
                d_w_K.addmv_(k_CK.t(), m_C)
                if low_rank is not None:
                    low_rank.backward(i, span, k_CK, m_C.unsqueeze(-1), d_k_CK)
                if d_CD is not target_CD:
                    target_CD.copy_(d_CD)

        d_basis, d_coefficients = (None, None) if low_rank is None else low_rank.gradients(query)
        return None, d_w_nK.to(given_w_nK.dtype), d_basis, d_coefficients, *d_sources


class _LowRank:
    """The token-dependent part of a query, with its gradients as they accumulate."""

    def __init__(self, basis_nRK: torch.Tensor, coefficients_BTR: torch.Tensor, dtype: torch.dtype) -> None:
        self.u_nRK = basis_nRK.to(dtype)
        self.c_NR = coefficients_BTR.reshape(-1, coefficients_BTR.shape[-1]).to(dtype)
        self.d_u_nRK = torch.zeros_like(self.u_nRK)
        self.d_c_NR = torch.zeros_like(self.c_NR)

    @classmethod
    def of(cls, query: DepthQuery, dtype: torch.dtype) -> "_LowRank | None":
        if query.basis_nRK is None or query.coefficients_BTR is None:
            return None
        return cls(query.basis_nRK, query.coefficients_BTR, dtype)

    def dots(self, i: int, k_CK: torch.Tensor) -> torch.Tensor:
        """⟨u_ir, k⟩ for every token and rank, [C, R]."""
        return k_CK @ self.u_nRK[i].t()

    def backward(self, i: int, span: slice, k_CK: torch.Tensor, m_C1: torch.Tensor, d_k_CK: torch.Tensor) -> None:
        """Add source ``i``'s share to the gradients of u and c, and theirs to the source's."""
        mc_CR = m_C1 * self.c_NR[span]
        d_k_CK.addmm_(mc_CR, self.u_nRK[i])
        self.d_u_nRK[i].addmm_(mc_CR.t(), k_CK)
        self.d_c_NR[span].addcmul_(self.dots(i, k_CK), m_C1)

    def gradients(self, query: DepthQuery) -> tuple[torch.Tensor, torch.Tensor]:
        assert query.basis_nRK is not None
        assert query.coefficients_BTR is not None
        d_c_BTR = self.d_c_NR.view(query.coefficients_BTR.shape)
        return self.d_u_nRK.to(query.basis_nRK.dtype), d_c_BTR.to(query.coefficients_BTR.dtype)
