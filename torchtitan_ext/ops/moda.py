"""Attention of each head, in one softmax, over a sequence of keys and over earlier layers' keys at the same token.

Shape suffixes: B = batch, T = tokens, N = query heads, K = key/value heads, G = N / K query heads to a key head,
H = head width, E = depth entries: earlier layers' keys and values, given as two sequences of [B, T, K, H] tensors.

With s_j the logits over the sequence and d_e those over the depth entries (Zhu et al., arXiv 2603.15619, section 2.2
and algorithm 1)::

    d_e = scale ⟨q, k_e⟩     Z = log(Σ_j exp s_j + Σ_e exp d_e)     o = Σ_j exp(s_j − Z) v_j + Σ_e exp(d_e − Z) v_e

The sequence part comes from a flash kernel with its log-sum-exp, the depth part is elementwise, and the two are
joined through Z. Backward, flash kernels make the probabilities anew from the log-sum-exp and need the output for
⟨∂o, o⟩ alone: given the *joint* Z and the joint o, the flash backward is exactly the sequence's share of the joint
gradient, and with p_e = exp(d_e − Z)::

    ∂v_e = Σ_g p_e ∂o      ∂d_e = p_e (⟨∂o, v_e⟩ − ⟨∂o, o⟩)      ∂k_e = scale Σ_g ∂d_e q      ∂q += scale Σ_e ∂d_e k_e

(Σ_g: over the query heads of a key head). No T × (T + E) scores are stored, the depth entries are neither stacked
nor copied, and what is kept for the backward pass is q, k, v, o, Z and references to the depth entries.

Accumulation is in fp32, or in fp64 for fp64 inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention

Tensors = tuple[torch.Tensor, ...]

CHUNK = 4
"""Depth entries handled by one call. The last chunk is filled up with entries that a bias of −∞ leaves out, so
functions that are compiled per chunk compile once, however many layers there are."""


def depth_forward(
    out_BTNH: torch.Tensor,
    lse_BTN: torch.Tensor,
    q_BTNH: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    bias_E: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take one chunk into the softmax: the output and log-sum-exp over what was there and the chunk's entries."""
    heads = keys[0].shape[2]
    q = _grouped(_widened(q_BTNH), heads)
    scores = [(q * _widened(key).unsqueeze(3)).sum(-1).flatten(2) * scale for key in keys]
    scores_EBTN = torch.stack(scores) + bias_E[:, None, None, None]
    z_BTN = torch.logaddexp(lse_BTN, scores_EBTN.logsumexp(0))
    out = _grouped(out_BTNH * torch.exp(lse_BTN - z_BTN).unsqueeze(-1), heads)
    for p_BTN, value in zip(torch.exp(scores_EBTN - z_BTN).unbind(0), values, strict=True):
        out = torch.addcmul(out, _grouped(p_BTN.unsqueeze(-1), heads), _widened(value).unsqueeze(3))
    return out.flatten(2, 3), z_BTN


def depth_backward(
    grad_BTNH: torch.Tensor,
    dot_BTN: torch.Tensor,
    z_BTN: torch.Tensor,
    q_BTNH: torch.Tensor,
    grad_q_BTNH: torch.Tensor,
    keys: Tensors,
    values: Tensors,
    bias_E: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, Tensors, Tensors]:
    """One chunk's backward pass, from ∂o, ⟨∂o, o⟩ and Z: ``grad_q_BTNH`` plus its part of ∂q, and ∂k_e, ∂v_e."""
    heads = keys[0].shape[2]
    grad, q = _grouped(_widened(grad_BTNH), heads), _grouped(_widened(q_BTNH), heads)
    grad_q = _grouped(grad_q_BTNH, heads)
    dot, z = _grouped(dot_BTN.unsqueeze(-1), heads), _grouped(z_BTN.unsqueeze(-1), heads)
    grad_keys, grad_values = [], []
    for key, value, bias in zip(keys, values, bias_E.unbind(0), strict=True):
        k, v = _widened(key).unsqueeze(3), _widened(value).unsqueeze(3)
        p = torch.exp((q * k).sum(-1, keepdim=True) * scale + bias - z)
        grad_score = p * ((grad * v).sum(-1, keepdim=True) - dot) * scale
        grad_q = torch.addcmul(grad_q, grad_score, k)
        grad_keys.append(_sum_of_products(grad_score, q).to(key.dtype))
        grad_values.append(_sum_of_products(p, grad).to(value.dtype))
    return grad_q.flatten(2, 3), tuple(grad_keys), tuple(grad_values)


class DepthKernels(NamedTuple):
    """The two elementwise functions above, or compiled versions of them."""

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = depth_forward
    backward: Callable[..., tuple[torch.Tensor, Tensors, Tensors]] = depth_backward


EAGER = DepthKernels()


def attend_with_depth(
    q_BTNH: torch.Tensor,
    k_BTKH: torch.Tensor,
    v_BTKH: torch.Tensor,
    depth_keys: Sequence[torch.Tensor],
    depth_values: Sequence[torch.Tensor],
    *,
    allowed: torch.Tensor | None = None,
    scale: float | None = None,
    kernels: DepthKernels = EAGER,
) -> torch.Tensor:
    """Attention over the sequence and one or more depth entries, [B, T, N, H].

    ``allowed`` [B, 1, T, T] (bool) says which tokens a token attends to, itself among them; without it, itself and
    those before. Uses a flash kernel where there is one (a CPU; a GPU in half precision without ``allowed``) and
    ``reference`` elsewhere.
    """
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    if not _has_flash(q_BTNH, k_BTKH, v_BTKH, allowed):
        return reference(q_BTNH, k_BTKH, v_BTKH, depth_keys, depth_values, allowed=allowed, scale=scale)
    return _JointAttention.apply(kernels, scale, allowed, q_BTNH, k_BTKH, v_BTKH, *depth_keys, *depth_values)


def join_depth(
    out_BTNH: torch.Tensor,
    lse_BTN: torch.Tensor,
    q_BTNH: torch.Tensor,
    depth_keys: Sequence[torch.Tensor],
    depth_values: Sequence[torch.Tensor],
    *,
    scale: float | None = None,
    kernels: DepthKernels = EAGER,
) -> torch.Tensor:
    """The same from the output and log-sum-exp of any attention over the sequence; gradients flow through both."""
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    return _JoinDepth.apply(kernels, scale, out_BTNH, lse_BTN, q_BTNH, *depth_keys, *depth_values)


def reference(
    q_BTNH: torch.Tensor,
    k_BTKH: torch.Tensor,
    v_BTKH: torch.Tensor,
    depth_keys: Sequence[torch.Tensor],
    depth_values: Sequence[torch.Tensor],
    *,
    allowed: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """The definition: one softmax over concatenated logits, on every device. Stores T × (T + E) scores per head."""
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    tokens, heads = q_BTNH.shape[1], k_BTKH.shape[2]
    if allowed is None:
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BTNH.device).tril()
    q = _grouped(_widened(q_BTNH), heads)
    scores = torch.einsum("btkgh,bskh->bkgts", q, _widened(k_BTKH)) * scale
    scores = scores.masked_fill(~allowed.unsqueeze(-3), -torch.inf)
    for key in depth_keys:
        depth = torch.einsum("btkgh,btkh->bkgt", q, _widened(key)) * scale
        scores = torch.cat([scores, depth.unsqueeze(-1)], dim=-1)
    p = scores.softmax(-1)
    out = torch.einsum("bkgts,bskh->btkgh", p[..., :tokens], _widened(v_BTKH))
    for e, value in enumerate(depth_values):
        out = out + torch.einsum("bkgt,btkh->btkgh", p[..., tokens + e], _widened(value))
    return out.flatten(2, 3).to(q_BTNH.dtype)


class _JointAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: DepthKernels,
        scale: float,
        allowed: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *depth: torch.Tensor,
    ) -> torch.Tensor:
        sequence_out, lse, rest = _flash(q, k, v, allowed, scale)
        out, z = _joined(kernels, scale, sequence_out, lse, q, depth)
        ctx.kernels, ctx.scale, ctx.rest = kernels, scale, rest
        ctx.save_for_backward(q, k, v, out, z, allowed, *depth)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, z, allowed, *depth = ctx.saved_tensors
        grad_q, grad_k, grad_v = _flash_backward(grad_out, q, k, v, out, z, allowed, ctx.scale, ctx.rest)
        dot = _dot(grad_out, out)
        # A copy in fp32 too, where the kernel's gradient is a view: compiled kernels tell views from other tensors, and
        # would be compiled once for the first chunk and once for those that follow it.
        grad_q = grad_q.to(_accumulator(q), copy=True)
        grad_q, grad_depth = _depth_backward(ctx.kernels, ctx.scale, grad_out, dot, z, q, grad_q, depth)
        return None, None, None, grad_q, grad_k, grad_v, *grad_depth


class _JoinDepth(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: DepthKernels,
        scale: float,
        sequence_out: torch.Tensor,
        lse: torch.Tensor,
        q: torch.Tensor,
        *depth: torch.Tensor,
    ) -> torch.Tensor:
        out, z = _joined(kernels, scale, sequence_out, lse, q, depth)
        ctx.kernels, ctx.scale = kernels, scale
        ctx.save_for_backward(sequence_out, lse, q, out, z, *depth)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sequence_out, lse, q, out, z, *depth = ctx.saved_tensors
        weight, dot = torch.exp(lse - z), _dot(grad_out, out)
        grad_sequence = (grad_out * weight.unsqueeze(-1)).to(sequence_out.dtype)
        grad_lse = (weight * (_dot(grad_out, sequence_out) - dot)).to(lse.dtype)
        grad_q = torch.zeros_like(q, dtype=_accumulator(q))
        grad_q, grad_depth = _depth_backward(ctx.kernels, ctx.scale, grad_out, dot, z, q, grad_q, depth)
        return None, None, grad_sequence, grad_lse, grad_q, *grad_depth


def _joined(
    kernels: DepthKernels, scale: float, sequence_out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, depth: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """The joint output, in the inputs' type, and Z [B, T, N], from the sequence part's."""
    # Detached: a compiled kernel then sees the same kind of tensor in training and in evaluation.
    q, depth = q.detach(), tuple(tensor.detach() for tensor in depth)
    out, z = _widened(sequence_out), lse
    for keys, values, bias, _ in _chunks(*_halves(depth), z.dtype):
        out, z = kernels.forward(out, z, q, keys, values, bias, scale)
    return out.to(q.dtype), z


def _depth_backward(
    kernels: DepthKernels,
    scale: float,
    grad_out: torch.Tensor,
    dot: torch.Tensor,
    z: torch.Tensor,
    q: torch.Tensor,
    grad_q: torch.Tensor,
    depth: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``grad_q`` with the depth part added, in q's type, and the gradients of the depth keys and values."""
    q = q.detach()
    entries = _halves(tuple(tensor.detach() for tensor in depth))
    grad_keys: list[torch.Tensor] = []
    grad_values: list[torch.Tensor] = []
    for keys, values, bias, real in _chunks(*entries, z.dtype):
        grad_q, of_keys, of_values = kernels.backward(grad_out, dot, z, q, grad_q, keys, values, bias, scale)
        grad_keys += of_keys[:real]
        grad_values += of_values[:real]
    return grad_q.to(q.dtype), grad_keys + grad_values


def _has_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None) -> bool:
    if q.device.type == "cpu":
        return True
    if q.device.type != "cuda" or allowed is not None or q.shape[-1] % 8:
        return False
    grouped = q.shape[2] != k.shape[2]
    return can_use_flash_attention(SDPAParams(*(t.transpose(1, 2) for t in (q, k, v)), None, 0.0, True, grouped))


# PyTorch's public scaled_dot_product_attention returns no log-sum-exp; the operations below it do.
_cpu, _cpu_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
_cuda, _cuda_backward = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Output [B, T, N, H] and log-sum-exp [B, T, N] over the sequence, and what else the kernel's backward takes."""
    heads_first = tuple(t.transpose(1, 2) for t in (q, k, v))
    if q.device.type == "cpu":
        mask = _additive(allowed, q.dtype)
        out, lse = _cpu(*heads_first, 0.0, mask is None, attn_mask=mask, scale=scale)
        return out.transpose(1, 2), lse.transpose(1, 2), ()
    out, lse, first_q, first_k, max_q, max_k, seed, offset, _ = _cuda(*heads_first, 0.0, True, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2), (first_q, first_k, max_q, max_k, seed, offset)


def _flash_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    z: torch.Tensor,
    allowed: torch.Tensor | None,
    scale: float,
    rest: tuple[Any, ...],
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v, in their layout."""
    heads_first = tuple(t.transpose(1, 2) for t in (grad_out, q, k, v, out))
    z = z.transpose(1, 2).contiguous()
    if q.device.type == "cpu":
        mask = _additive(allowed, q.dtype)
        grads = _cpu_backward(*heads_first, z, 0.0, mask is None, attn_mask=mask, scale=scale)
    else:
        first_q, first_k, max_q, max_k, seed, offset = rest
        grads = _cuda_backward(*heads_first, z, first_q, first_k, max_q, max_k, 0.0, True, seed, offset, scale=scale)
    return tuple(grad.transpose(1, 2) for grad in grads)


def _additive(allowed: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if allowed is None:
        return None
    return torch.zeros_like(allowed, dtype=dtype).masked_fill(~allowed, -torch.inf)


def _chunks(keys: Tensors, values: Tensors, dtype: torch.dtype) -> Iterator[tuple[Tensors, Tensors, torch.Tensor, int]]:
    """The entries ``CHUNK`` at a time: keys, values, the bias [E] that leaves out what fills the last chunk up, and how
    many are real."""
    for start in range(0, len(keys), CHUNK):
        some_keys, some_values = keys[start : start + CHUNK], values[start : start + CHUNK]
        real = len(some_keys)
        bias = torch.zeros(CHUNK, dtype=dtype, device=keys[0].device)
        if real < CHUNK:
            bias[real:] = -torch.inf
            fillers = _fillers(keys[0].shape, keys[0].dtype, keys[0].device)
            some_keys, some_values = some_keys + fillers[real:CHUNK], some_values + fillers[CHUNK + real :]
        yield some_keys, some_values, bias, real


@lru_cache(maxsize=2)
def _fillers(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Zeros to fill a chunk of keys and one of values up with, each a tensor of its own: a compiled function would be
    compiled again for a call that gives it the same tensor twice."""
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2 * CHUNK))


def _halves(depth: Tensors) -> tuple[Tensors, Tensors]:
    entries = len(depth) // 2
    return depth[:entries], depth[entries:]


def _grouped(tensor_BTNX: torch.Tensor, key_heads: int) -> torch.Tensor:
    return tensor_BTNX.unflatten(2, (key_heads, -1))


def _sum_of_products(a_BTKGX: torch.Tensor, b_BTKGX: torch.Tensor) -> torch.Tensor:
    """Σ_g a ⊙ b, one g after another: eager, a product with all of g and its sum take three times as long."""
    (a, *more_a), (b, *more_b) = a_BTKGX.unbind(3), b_BTKGX.unbind(3)
    total = a * b
    for a, b in zip(more_a, more_b, strict=True):
        total = torch.addcmul(total, a, b)
    return total


def _accumulator(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_accumulator(tensor))


def _dot(a_BTNH: torch.Tensor, b_BTNH: torch.Tensor) -> torch.Tensor:
    return (_widened(a_BTNH) * b_BTNH).sum(-1)
