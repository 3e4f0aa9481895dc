"""Depth reads by two Triton kernels, one forward and one backward: a whole read, or either phase of one in two phases.

Shape suffixes: B = batch, T = tokens, N = B·T tokens, D = model width, K = key width, n = sources, G = queries, P =
programs.

A depth read moves memory and computes little, so the kernels are laid out for their bytes. Forward, a program reads the
sources of one token one after the other, the next ones already under way, and keeps a running softmax and sum of each
query in registers: each source is read once, for all queries. Backward, each source is read once and its gradient
written once. Only a whole read needs its sources twice in succession, the second time from cache, for the ⟨g, h⟩ that
the phases hand to each other. A program does so for several tokens in turn and adds up the gradient of w on the way;
the programs' shares are summed afterwards, always in the same order. What backward keeps is what
``torchtitan_ext.ops.depth_read`` keeps; its docstrings have the formulas.

Tensors stay where they are. Their addresses, scales and biases are arguments of a small launch that writes them into a
table on the device, so nothing is stacked, copied from the host or waited for, a CUDA graph can hold all launches, and
the two large kernels are compiled once for any number of sources.

All arithmetic is in fp32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from . import depth_read_kernels as kernels
from .depth_query import DepthQuery, Found

THREAD_ELEMENTS = 16
"""Coordinates of a vector that one thread holds: of w, of the sum or the gradient, of a source, as fp32 registers."""
LOADED_AHEAD = 3
"""Sources of a token that a program has under way at once: five programs share a multiprocessor (``ptxas``, for sm_90
at D = 1536), and a round trip to memory is 25 KB long."""
TOKENS_PER_PROGRAM = 16
"""Tokens that a program handles in turn, at most. Each program writes one share of w's gradient, K fp32 numbers: 1% of
what it moves with 9 sources in bf16."""
ENOUGH_PROGRAMS = 1024
"""Programs that keep any GPU busy; where tokens are few, a program handles fewer than ``TOKENS_PER_PROGRAM``."""


class _Static(NamedTuple):
    """What of some queries is no tensor."""

    phase: int
    scales: Sequence[float] | None
    biases: Sequence[Sequence[float] | None]
    eps: float


class _Reads(torch.autograd.Function):
    """Arguments: what is static, w [G, n or 1, K], what the first phase found, the sources. Results: G reads, and in
    the first phase their log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any,
        static: _Static,
        w: torch.Tensor,
        before_h_BTD: torch.Tensor | None,
        before_lse_BT: torch.Tensor | None,
        *sources: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        launch = _Launch(static, w, sources)
        dtype = torch.float32 if static.phase == kernels.FIRST.value else sources[0].dtype
        h_GBTD = [torch.empty_like(sources[0], dtype=dtype, memory_format=torch.contiguous_format) for _ in w]
        logit_GnN = w.new_empty(len(w), launch.n, launch.tokens, dtype=torch.float32)
        inverse_rms_nN, lse_GN = torch.empty_like(logit_GnN[0]), torch.empty_like(logit_GnN[:, 0])
        # Where there was no first phase, any tensor stands in for what it found: the kernel does not look at it.
        before = [lse_GN if tensor is None else tensor.contiguous() for tensor in (before_h_BTD, before_lse_BT)]
        launch(kernels.forward, [logit_GnN, inverse_rms_nN, lse_GN, launch.w, *before], h_GBTD, static.eps)
        ctx.static = static
        ctx.set_materialize_grads(False)
        h_BTD = h_GBTD[0] if static.phase == kernels.SECOND.value else None
        ctx.save_for_backward(w, h_BTD, before_lse_BT, logit_GnN, inverse_rms_nN, lse_GN, *sources)
        if static.phase == kernels.FIRST.value:
            return (*h_GBTD, *lse_GN.view(len(w), *sources[0].shape[:-1]).unbind())
        return tuple(h_GBTD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        w, h_BTD, before_lse_BT, logit_GnN, inverse_rms_nN, lse_GN, *sources = ctx.saved_tensors
        static: _Static = ctx.static
        if all(grad is None for grad in grads):
            return (None,) * (4 + len(sources))
        dtype = torch.float32 if static.phase == kernels.FIRST.value else sources[0].dtype
        none_BTD = torch.zeros_like(sources[0], dtype=dtype)
        grad_GBTD = [none_BTD if grad is None else _aligned(grad) for grad in grads[: len(w)]]
        launch = _Launch(static, w, sources)
        d_sources = [torch.empty_like(source, memory_format=torch.contiguous_format) for source in sources]
        d_w_PGnK = torch.empty(*launch.grid, *w.shape, dtype=torch.float32, device=w.device)
        dot_GN, d_before_BTD, d_before_BT, h = [lse_GN] * 4  # stand-ins, as above
        alone = static.phase == kernels.WHOLE.value
        if static.phase == kernels.FIRST.value:
            alone = any(grad is None for grad in grads[len(w) :])
            unknown_N = torch.full_like(lse_GN[0], torch.nan)
            dot_GN = torch.stack([unknown_N if grad is None else grad.reshape(-1) for grad in grads[len(w) :]])
        elif static.phase == kernels.SECOND.value:
            h_BTD = h_BTD.contiguous()
            h, d_before_BT = h_BTD, torch.empty_like(before_lse_BT)
            d_before_BTD = torch.empty_like(h_BTD, dtype=torch.float32)
        before_lse = lse_GN if before_lse_BT is None else before_lse_BT.contiguous()
        made = [d_w_PGnK, dot_GN, d_before_BTD, d_before_BT]
        kept = [logit_GnN, inverse_rms_nN, lse_GN, launch.w, h, before_lse]
        launch(kernels.backward, [*made, *kept], [*d_sources, *grad_GBTD], ALONE=alone)
        found = (d_before_BTD, d_before_BT) if static.phase == kernels.SECOND.value else (None, None)
        return None, d_w_PGnK.sum(0).to(w.dtype), *found, *d_sources


class _Launch:
    """How reads of ``sources`` are divided among programs, and starting a kernel so."""

    def __init__(self, static: _Static, w: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        self.n, (queries, rows, key_width), width = len(sources), w.shape, sources[0].shape[-1]
        self.w = w.float().contiguous()
        self.sources = [_aligned(source) for source in sources]
        columns = [static.scales or [1.0] * self.n, *(biases or [0.0] * self.n for biases in static.biases)]
        self.numbers = [float(number) for column in columns for number in column]
        self.tokens = sources[0].numel() // width
        self.run = min(TOKENS_PER_PROGRAM, triton.cdiv(self.tokens, ENOUGH_PROGRAMS))
        self.grid = (triton.cdiv(self.tokens, self.run),)
        element = _ELEMENTS[sources[0].dtype]
        wide, many = triton.next_power_of_2(width), triton.next_power_of_2(queries)
        self.options = {
            "G": queries, "D": width, "K": key_width, "ONE_W": rows == 1, "PHASE": static.phase,
            # Several vectors are loaded beside each source, and their gradients: too much to load in advance.
            "QUERIES": many, "WIDTH": wide, "STAGES": LOADED_AHEAD if rows == 1 else 1,
            "element": element, "read_element": tl.float32 if static.phase == kernels.FIRST.value else element,
            "num_warps": min(16, max(1, many * wide // (32 * THREAD_ELEMENTS))),
        }  # fmt: skip

    def __call__(
        self, kernel: Any, tensors: list[torch.Tensor], table: list[torch.Tensor], *last: float, **more: Any
    ) -> None:
        """Start ``kernel`` on ``tensors``, a table of the sources and those in ``table``, sizes and the rest."""
        addresses, numbers = _filled([*self.sources, *table]), _filled(self.numbers)
        at = torch.empty(len(addresses), dtype=torch.int64, device=self.w.device)
        values = torch.empty(len(numbers), dtype=torch.float32, device=self.w.device)
        with torch.cuda.device_of(at):
            kernels.write_table[1,](at, values, addresses, numbers, len(addresses), len(numbers), num_warps=1)
            kernel[self.grid](*tensors, at, values, self.n, self.tokens, self.run, *last, **self.options, **more)


_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def depth_read_triton(sources: Sequence[torch.Tensor], query: DepthQuery, before: Found | None = None) -> torch.Tensor:
    """``depth_read`` [B, T, D] of sources [B, T, D] in fp32, bf16 or fp16, all of one type and on one CUDA device.

    Differentiable once, in the sources and in ``query.w_nK``. A query with a token-dependent part is not done here. A
    source that is not contiguous is copied. Where ``w_nK`` is one vector expanded over the sources (stride 0), it and
    its gradient stay in registers.
    """
    static = _Static(
        (kernels.WHOLE if before is None else kernels.SECOND).value, query.scales, [query.biases], query.eps
    )
    (h_BTD,) = _Reads.apply(static, _vectors([query]), *(before or (None, None)), *sources)
    return h_BTD


def find_triton(sources: Sequence[torch.Tensor], queries: Sequence[DepthQuery]) -> list[Found]:
    """``find`` of the same sources: a few queries at a time, as many as fit in registers together."""
    most = max(1, 16 * 32 * THREAD_ELEMENTS // triton.next_power_of_2(sources[0].shape[-1]))
    passes = triton.cdiv(len(queries), most)
    together = triton.cdiv(len(queries), passes)
    found = []
    for start in range(0, len(queries), together):
        some = queries[start : start + together]
        static = _Static(kernels.FIRST.value, some[0].scales, [query.biases for query in some], some[0].eps)
        results = _Reads.apply(static, _vectors(some), None, None, *sources)
        found += [Found(*pair) for pair in zip(results[: len(some)], results[len(some) :], strict=True)]
    return found


def _vectors(queries: Sequence[DepthQuery]) -> torch.Tensor:
    """w of all queries, [G, n, K], or [G, 1, K] where each is one vector for all sources."""
    assert all(query.basis_nRK is None and query.coefficients_BTR is None for query in queries)
    each = [query.w_nK for query in queries]
    if all(w_nK.stride(0) == 0 for w_nK in each):
        each = [w_nK[:1] for w_nK in each]
    return torch.stack(each)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its rows one after another, from an address that 16 divides, as the kernels are told."""
    contiguous = tensor.contiguous()
    return contiguous if contiguous.data_ptr() % 16 == 0 else contiguous.clone()


def _filled(entries: list[Any]) -> tuple[Any, ...]:
    """A power of two of entries, so that few numbers of them occur; what is filled in is never used."""
    return (*entries, *[entries[0]] * (triton.next_power_of_2(len(entries)) - len(entries)))
