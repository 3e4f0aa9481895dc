"""Depth reads without stacking their sources: alone, or several at once over sources that they share.

``depth_query`` has the formula and its plain form. What costs time here is moving sources through memory, not
arithmetic, so both passes walk through the tokens in chunks: while a chunk of every source is in cache, first the
weights are made from it and then the sums. For backward there are kept references to the sources, two numbers per
source and token (logit and inverse RMS) and one per token (the log-sum-exp).

**Two phases** (Kimi Team, arXiv 2603.15031, section 4). All reads within one block see the same finished blocks.
``find`` puts all their queries to those sources in one pass, long before the later ones of the reads are made;
``depth_read`` then takes in what the read was given beforehand with the sources that it has alone, by online softmax.
In backward a shared source gets one gradient, not one per read.

Shape suffixes: B = batch, T = tokens, N = B·T tokens, C = tokens of one chunk, D = model width, K = key width (keys
are the last K of the D coordinates), R = rank of the token-dependent part of the query, n = sources, G = queries.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .depth_query import DepthQuery, Found, accumulation_dtype, columns, depth_read_reference, find_reference

_CPU_CHUNK_ELEMENTS = 2 * 1024 * 1024
"""Elements of all the tensors in a chunk together, for each CPU thread: 8 MiB in fp32. Less would be nearer to what a
core's own cache holds, but more of the time would go into starting operations."""
_DEVICE_CHUNK_ELEMENTS = 32 * 1024 * 1024
"""Elements of one tensor in a chunk on a GPU, where a chunk bounds the temporary copies in fp32."""


def depth_read(sources: Sequence[torch.Tensor], query: DepthQuery, before: Found | None = None) -> torch.Tensor:
    """The depth read [B, T, D] of sources [B, T, D].

    ``before``: what ``find`` found for this query in sources that it shares with others; each such finding may be
    taken in by one read only. Differentiable once, in the sources and in the query's tensors. Inside a compiled graph
    the definition takes over, for there the compiler does the fusing.
    """
    if torch.compiler.is_compiling():
        return depth_read_reference(sources, query, before)
    first = (None, None) if before is None else before
    low_rank = (query.basis_nRK, query.coefficients_BTR)
    (h_BTD,) = _Reads.apply(_Static.of([query]), *low_rank, *first, query.w_nK, *sources)
    return h_BTD


def find(sources: Sequence[torch.Tensor], queries: Sequence[DepthQuery]) -> list[Found]:
    """What each of several queries finds in the same sources, in one pass over them.

    The queries have equal scales and no token-dependent part. What is found is for ``depth_read`` and ``take`` alone:
    its two tensors' gradients have a meaning among these functions that other users of them would not give them.
    """
    static = _Static.of(queries)
    if torch.compiler.is_compiling():
        return [find_reference(sources, query) for query in queries]
    vectors = [query.w_nK for query in queries]
    outputs = _Reads.apply(static._replace(open_ended=True), None, None, None, None, *vectors, *sources)
    return [Found(*pair) for pair in zip(outputs[: len(queries)], outputs[len(queries) :], strict=True)]


def take(before: Found, dtype: torch.dtype) -> torch.Tensor:
    """The read [B, T, D], in ``dtype``, of a query that has no other sources than those in which ``before`` was found.

    Not the same as ``before.h_BTD``: it hands back what a second phase does. Without that, a gradient that is missing
    and one that a wrapper on the way has filled in with zeros (as FSDP's do) would mean different things.
    """
    if torch.compiler.is_compiling():
        return before.h_BTD.to(dtype)
    return _Take.apply(*before, dtype)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BTD: torch.Tensor, lse_BT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        taken_BTD = h_BTD.to(dtype, copy=True)
        ctx.save_for_backward(taken_BTD)
        ctx.dtype = h_BTD.dtype
        return taken_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (h_BTD,) = ctx.saved_tensors
        grad_BTD = grad_BTD.to(ctx.dtype)
        return grad_BTD, -(grad_BTD * h_BTD).sum(-1), None


class _Static(NamedTuple):
    """What of some queries is no tensor. ``open_ended``: the reads' other sources are still to come."""

    queries: int
    scales: Sequence[float] | None
    biases: Sequence[Sequence[float] | None]
    eps: float
    open_ended: bool = False

    @classmethod
    def of(cls, queries: Sequence[DepthQuery]) -> "_Static":
        return cls(len(queries), queries[0].scales, [query.biases for query in queries], queries[0].eps)


class _Reads(torch.autograd.Function):
    """G reads of n sources, with their derivative written out.

    Of one read, with g = dL/dh, β_i = dL/dα_i = s_i ⟨g, v_i⟩, δ_i = dL/dlogit_i = α_i (β_i − ⟨g, h⟩), r_i the inverse
    RMS of k_i, l_i the logit without its bias, and m_i = δ_i s_i r_i::

        dL/dv_i = α_i s_i g + [last K] ( m_i (w_i + Σ_r c_r u_ir) − δ_i l_i (s_i r_i)² v_i / K )
        dL/dw_i = Σ_tokens m_i v_i[-K:]
        dL/du_ir = Σ_tokens c_r m_i v_i[-K:]
        dL/dc_r = Σ_i m_i ⟨u_ir, v_i[-K:]⟩

    A read in two phases: let a = exp(lse′ − lse) be the share of the sources seen beforehand, where α_i = a α′_i. The
    second phase hands back a g as the gradient of h′, and −a ⟨g, h⟩ in the place of that of lse′. The first phase then
    has δ_i = α_i (β_i − ⟨g, h⟩) = α′_i (s_i ⟨a g, v_i⟩ − a ⟨g, h⟩) without h′, which so need not be kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        static: _Static,
        basis_nRK: torch.Tensor | None,
        coefficients_BTR: torch.Tensor | None,
        before_h_BTD: torch.Tensor | None,
        before_lse_BT: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        given, sources = tensors[: static.queries], tensors[static.queries :]
        dtype, n = accumulation_dtype(sources[0]), len(sources)
        h_dtype = dtype if static.open_ended else sources[0].dtype
        h_GBTD = [torch.empty_like(sources[0], dtype=h_dtype, memory_format=torch.contiguous_format) for _ in given]
        batch, length, _ = sources[0].shape
        logit_GnN = sources[0].new_empty(len(given), n, batch * length, dtype=dtype)
        rms_nN, lse_GN = torch.empty_like(logit_GnN[0]), torch.empty_like(logit_GnN[:, 0])
        w_nGK = torch.stack(given, 1).to(dtype)
        key_width = w_nGK.shape[-1]
        low_rank = _LowRank.of(basis_nRK, coefficients_BTR, dtype)
        scale_n1, bias_Gn1 = columns(n, static.scales, static.biases, lse_GN)

        start = 0
        earlier = () if before_h_BTD is None else (before_h_BTD,)
        for chunks in _chunks((*h_GBTD, *earlier, *sources)):
            out_GCD, h_CD, v_nCD = chunks[: len(given)], chunks[len(given) : -n], chunks[-n:]
            span = slice(start, start := start + len(v_nCD[0]))
            logit_GnC, rms_nC = logit_GnN[..., span], rms_nN[:, span]
            for i, v_CD in enumerate(v_nCD):
                k_CK = _keys(v_CD, key_width).to(dtype)
                torch.mm(w_nGK[i], k_CK.t(), out=logit_GnC[:, i])
                if low_rank is not None:
                    logit_GnC[0, i] += (low_rank.dots(i, k_CK) * low_rank.c_NR[span]).sum(-1)
                torch.linalg.vector_norm(_keys(v_CD, key_width), dim=-1, dtype=dtype, out=rms_nC[i])
            rms_nC.mul_(scale_n1).square_().div_(key_width).add_(static.eps).rsqrt_()
            logit_GnC.mul_(scale_n1 * rms_nC)
            biased_GnC = logit_GnC + bias_Gn1
            lse_GC = torch.logsumexp(biased_GnC, 1)
            if before_lse_BT is not None:
                lse_C = _rows(before_lse_BT, span)
                lse_GC = torch.logaddexp(lse_GC, lse_C)
                kept_C1 = (lse_C - lse_GC[0]).exp_().unsqueeze(-1)
            lse_GN[:, span] = lse_GC
            share_GnC1 = biased_GnC.sub_(lse_GC.unsqueeze(1)).exp_().mul_(scale_n1).unsqueeze(-1)
            for out_CD, share_nC1 in zip(out_GCD, share_GnC1, strict=True):
                sum_CD = out_CD if out_CD.dtype == dtype else torch.empty_like(out_CD, dtype=dtype)
                torch.mul(v_nCD[0], share_nC1[0], out=sum_CD)
                for v_CD, share_C1 in zip(v_nCD[1:], share_nC1[1:], strict=True):
                    sum_CD.addcmul_(v_CD, share_C1)
                if h_CD:
                    sum_CD.addcmul_(h_CD[0], kept_C1)
                if sum_CD is not out_CD:
                    out_CD.copy_(sum_CD)

        ctx.static = static
        # In two phases ⟨g, h⟩ cannot be made from this phase's sources; h itself is what the sublayer keeps anyway.
        whole = (None if before_h_BTD is None else h_GBTD[0], before_lse_BT)
        ctx.save_for_backward(basis_nRK, coefficients_BTR, *whole, logit_GnN, rms_nN, lse_GN, *tensors)
        ctx.set_materialize_grads(False)
        if not static.open_ended:
            return tuple(h_GBTD)
        return (*h_GBTD, *lse_GN.view(len(given), batch, length).unbind())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        static = ctx.static
        basis_nRK, coefficients_BTR, h_BTD, before_lse_BT, logit_GnN, rms_nN, lse_GN, *tensors = ctx.saved_tensors
        given, sources = tensors[: static.queries], tensors[static.queries :]
        dtype, n = logit_GnN.dtype, len(sources)
        asked = [index for index, grad in enumerate(grads[: static.queries]) if grad is not None]
        if not asked:
            return (None,) * (5 + len(tensors))
        grad_GBTD = [grads[index] for index in asked]
        w_nGK = torch.stack([given[index] for index in asked], 1).to(dtype)
        key_width = w_nGK.shape[-1]
        low_rank = _LowRank.of(basis_nRK, coefficients_BTR, dtype)
        scale_n1, bias_Gn1 = columns(n, static.scales, static.biases, lse_GN)
        if len(asked) < len(given):
            logit_GnN, lse_GN, bias_Gn1 = logit_GnN[asked], lse_GN[asked], bias_Gn1[asked]
        in_place_of_lse = [grads[static.queries + index] for index in asked] if static.open_ended else []
        d_w_nGK = torch.zeros_like(w_nGK)
        d_sources = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
        second_phase = h_BTD is not None
        d_before = (
            [
                torch.empty_like(h_BTD, dtype=dtype),
                torch.empty_like(before_lse_BT, memory_format=torch.contiguous_format),
            ]
            if second_phase
            else []
        )
        between = [h_BTD, d_before[0]] if second_phase else []

        start = 0
        for chunks in _chunks((*grad_GBTD, *between, *sources, *d_sources)):
            g_GCD, v_nCD, d_nCD = [g.to(dtype) for g in chunks[: len(asked)]], chunks[-2 * n : -n], chunks[-n:]
            span = slice(start, start := start + len(v_nCD[0]))
            logit_GnC, rms_nC, lse_GC = logit_GnN[..., span], rms_nN[:, span], lse_GN[:, span]
            work_CD = torch.empty_like(g_GCD[0])
            beta_GnC = torch.empty_like(logit_GnC, memory_format=torch.contiguous_format)
            for g_CD, beta_nC in zip(g_GCD, beta_GnC, strict=True):
                for v_CD, beta_C in zip(v_nCD, beta_nC, strict=True):
                    torch.sum(torch.mul(g_CD, v_CD, out=work_CD), -1, out=beta_C)
            beta_GnC.mul_(scale_n1)
            alpha_GnC = (logit_GnC + bias_Gn1).sub_(lse_GC.unsqueeze(1)).exp_()
            if second_phase:
                h_CD, d_before_CD = chunks[1:3]
                dot_GC = torch.mul(g_GCD[0], h_CD, out=work_CD).sum(-1).unsqueeze(0)
                kept_C = (_rows(before_lse_BT, span) - lse_GC[0]).exp_()
                d_before_CD.copy_(torch.mul(g_GCD[0], kept_C.unsqueeze(-1), out=work_CD))
                torch.mul(dot_GC[0], kept_C.neg_(), out=d_before[1].view(-1)[span])
            elif static.open_ended:
                dot_GC = -torch.stack([_rows(grad_BT, span) for grad_BT in in_place_of_lse])
            else:
                dot_GC = (alpha_GnC * beta_GnC).sum(1)
            delta_GnC = beta_GnC.sub_(dot_GC.unsqueeze(1)).mul_(alpha_GnC)
            scaled_rms_nC = rms_nC * scale_n1
            m_GnC = delta_GnC.mul_(scaled_rms_nC)
            pull_nC1 = (m_GnC * logit_GnC).sum(0).mul_(scaled_rms_nC).div_(-key_width).unsqueeze(-1)
            share_GnC1 = alpha_GnC.mul_(scale_n1).unsqueeze(-1)
            for i, (v_CD, target_CD) in enumerate(zip(v_nCD, d_nCD, strict=True)):
                k_CK = _keys(v_CD, key_width).to(dtype)
                d_CD = target_CD if target_CD.dtype == dtype else work_CD
                torch.mul(g_GCD[0], share_GnC1[0, i], out=d_CD)
                for g_CD, share_nC1 in zip(g_GCD[1:], share_GnC1[1:], strict=True):
                    d_CD.addcmul_(g_CD, share_nC1[i])
                d_k_CK, m_GC = _keys(d_CD, key_width), m_GnC[:, i]
                d_k_CK.addcmul_(k_CK, pull_nC1[i]).addmm_(m_GC.t(), w_nGK[i])
                d_w_nGK[i].addmm_(m_GC, k_CK)
                if low_rank is not None:
                    low_rank.backward(i, span, k_CK, m_GC[0].unsqueeze(-1), d_k_CK)
                if d_CD is not target_CD:
                    target_CD.copy_(d_CD)

        d_basis, d_coefficients = (None, None) if low_rank is None else low_rank.gradients(basis_nRK, coefficients_BTR)
        d_given: list[torch.Tensor | None] = [None] * len(given)
        for index, d_w_nK in zip(asked, d_w_nGK.unbind(1), strict=True):
            d_given[index] = d_w_nK.to(given[index].dtype)
        return None, d_basis, d_coefficients, *(d_before or (None, None)), *d_given, *d_sources


def _rows(grad_BT: torch.Tensor, span: slice) -> torch.Tensor:
    return grad_BT.reshape(-1)[span]


def _chunks(tensors: Sequence[torch.Tensor]) -> Any:
    """Views [C, D] of tensors [B, T, D] (or copies, where a tensor's strides allow no view), chunk by chunk."""
    width = tensors[0].shape[-1]
    if tensors[0].device.type == "cpu":
        elements = _CPU_CHUNK_ELEMENTS * torch.get_num_threads() // len(tensors)
    else:
        elements = _DEVICE_CHUNK_ELEMENTS
    rows = max(1, elements // width)
    return zip(*(tensor_BTD.reshape(-1, width).split(rows) for tensor_BTD in tensors), strict=True)


def _keys(v_CD: torch.Tensor, key_width: int) -> torch.Tensor:
    return v_CD if v_CD.shape[-1] == key_width else v_CD[:, -key_width:]


class _LowRank:
    """The token-dependent part of a query, with its gradients as they accumulate."""

    def __init__(self, basis_nRK: torch.Tensor, coefficients_BTR: torch.Tensor, dtype: torch.dtype) -> None:
        self.u_nRK = basis_nRK.to(dtype)
        self.c_NR = coefficients_BTR.reshape(-1, coefficients_BTR.shape[-1]).to(dtype)
        self.d_u_nRK = torch.zeros_like(self.u_nRK)
        self.d_c_NR = torch.zeros_like(self.c_NR)

    @classmethod
    def of(
        cls, basis_nRK: torch.Tensor | None, coefficients_BTR: torch.Tensor | None, dtype: torch.dtype
    ) -> "_LowRank | None":
        if basis_nRK is None or coefficients_BTR is None:
            return None
        return cls(basis_nRK, coefficients_BTR, dtype)

    def dots(self, i: int, k_CK: torch.Tensor) -> torch.Tensor:
        """⟨u_ir, k⟩ for every token and rank, [C, R]."""
        return k_CK @ self.u_nRK[i].t()

    def backward(self, i: int, span: slice, k_CK: torch.Tensor, m_C1: torch.Tensor, d_k_CK: torch.Tensor) -> None:
        """Add source ``i``'s share to the gradients of u and c, and theirs to the source's."""
        mc_CR = m_C1 * self.c_NR[span]
        d_k_CK.addmm_(mc_CR, self.u_nRK[i])
        self.d_u_nRK[i].addmm_(mc_CR.t(), k_CK)
        self.d_c_NR[span].addcmul_(self.dots(i, k_CK), m_C1)

    def gradients(self, basis_nRK: torch.Tensor, coefficients_BTR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        d_c_BTR = self.d_c_NR.view(coefficients_BTR.shape)
        return self.d_u_nRK.to(basis_nRK.dtype), d_c_BTR.to(coefficients_BTR.dtype)
