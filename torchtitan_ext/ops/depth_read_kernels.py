"""The two Triton kernels of depth reads, forward and backward: see ``depth_read_triton``, which starts them.

Shape suffixes: N = tokens of the whole batch, D = model width, K = key width (keys are the last K of the D
coordinates), n = sources, G = queries, both D and G filled up to powers of two (``WIDTH``, ``QUERIES``); 1 = an axis to
broadcast over.

A program handles ``run`` tokens in turn. Tensors [N, D] are given by their addresses in a table, which ``write_table``
makes.
"""

import triton
import triton.language as tl

WHOLE, FIRST, SECOND = (tl.constexpr(phase) for phase in range(3))
"""A read of all its sources; its first phase, which leaves the softmax open; its second, which takes that in."""


@triton.jit
def write_table(addresses, numbers, tensors, floats, TENSORS: tl.constexpr, FLOATS: tl.constexpr):
    for i in tl.static_range(TENSORS):
        tl.store(addresses + i, tensors[i].to(tl.int64))
    for i in tl.static_range(FLOATS):
        tl.store(numbers + i, floats[i])


@triton.jit
def _at(addresses, row, place_1D, D: tl.constexpr, element: tl.constexpr):
    """Addresses of ``place_1D`` in the tensor, or the [G, 1] tensors, number ``row`` of the table."""
    at = tl.load(addresses + row).to(tl.pointer_type(element)) + place_1D
    if D % 16 == 0:
        at = tl.multiple_of(at, (1, 16))
    return at


@triton.jit(do_not_specialize=["n", "tokens", "run"])
def forward(
    logit_GnN, inverse_rms_nN, lse_GN, w, before_ND, before_N, addresses, numbers, n, tokens, run, eps,
    G: tl.constexpr, D: tl.constexpr, K: tl.constexpr, ONE_W: tl.constexpr, PHASE: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, element: tl.constexpr, read_element: tl.constexpr,
):  # fmt: skip
    """Table: addresses of n sources and G results; n scales and G · n biases."""
    first = tl.program_id(0) * run
    g_G1 = tl.arange(0, QUERIES)[:, None]
    d_1D = tl.arange(0, WIDTH)[None, :]
    asked_G1, in_row_1D = g_G1 < G, d_1D < D
    in_key_1D = in_row_1D & (d_1D >= D - K)
    if ONE_W:
        w_GD = tl.load(w + g_G1 * K + d_1D - (D - K), mask=asked_G1 & in_key_1D, other=0.0)
    for token in range(first, tl.minimum(first + run, tokens)):
        place_1D = tl.cast(token, tl.int64) * D + d_1D
        if PHASE == SECOND:
            top_G1 = tl.load(before_N + token + 0 * g_G1)
            total_G1 = tl.full([QUERIES, 1], 1.0, tl.float32)
            sum_GD = tl.load(before_ND + 0 * g_G1 + place_1D, mask=in_row_1D, other=0.0).to(tl.float32)
        else:
            top_G1 = tl.full([QUERIES, 1], -float("inf"), tl.float32)
            total_G1 = tl.zeros([QUERIES, 1], tl.float32)
            sum_GD = tl.zeros([QUERIES, WIDTH], tl.float32)
        for i in tl.range(0, n, num_stages=STAGES):
            at_1D = _at(addresses, i, place_1D, D, element)
            v_1D = tl.load(at_1D, mask=in_row_1D, other=0.0).to(tl.float32)
            if not ONE_W:
                w_GD = tl.load(w + (g_G1 * n + i) * K + d_1D - (D - K), mask=asked_G1 & in_key_1D, other=0.0)
            key_1D = v_1D
            if K < D:
                key_1D = tl.where(in_key_1D, v_1D, 0.0)
            scale = tl.load(numbers + i)
            bias_G1 = tl.load(numbers + n + g_G1 * n + i, mask=asked_G1, other=0.0)
            inverse_rms = tl.rsqrt(tl.sum(tl.sum(key_1D * key_1D, 1), 0) * scale * scale / K + eps)
            logit_G1 = tl.sum(key_1D * w_GD, 1, keep_dims=True) * (scale * inverse_rms)
            higher_G1 = tl.maximum(top_G1, logit_G1 + bias_G1)
            shrink_G1 = tl.exp(top_G1 - higher_G1)
            share_G1 = tl.exp(logit_G1 + bias_G1 - higher_G1)
            total_G1 = total_G1 * shrink_G1 + share_G1
            sum_GD = sum_GD * shrink_G1 + share_G1 * scale * v_1D
            top_G1 = higher_G1
            scalar = tl.cast(i, tl.int64) * tokens + token
            tl.store(logit_GnN + tl.cast(g_G1, tl.int64) * n * tokens + scalar, logit_G1, mask=asked_G1)
            tl.store(inverse_rms_nN + scalar, inverse_rms)
        tl.store(lse_GN + g_G1 * tokens + token, top_G1 + tl.log(total_G1), mask=asked_G1)
        at_GD = _at(addresses + n, tl.minimum(g_G1, G - 1), place_1D, D, read_element)
        tl.store(at_GD, (sum_GD / total_G1).to(read_element), mask=asked_G1 & in_row_1D)


@triton.jit(do_not_specialize=["n", "tokens", "run"])
def backward(
    d_w, dot_GN, d_before_ND, d_before_N, logit_GnN, inverse_rms_nN, lse_GN, w, h_ND, before_N,
    addresses, numbers, n, tokens, run,
    G: tl.constexpr, D: tl.constexpr, K: tl.constexpr, ONE_W: tl.constexpr, PHASE: tl.constexpr, ALONE: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, element: tl.constexpr, read_element: tl.constexpr,
):  # fmt: skip
    """Table: addresses of n sources, their n gradients and the G gradients of the results; numbers as forward.

    ``dot_GN`` is what stands in the place of lse's gradient: minus ⟨g, h⟩, or NaN where no other phase follows.
    ``ALONE``: there is such a read among these.
    """
    program = tl.program_id(0)
    first = program * run
    g_G1 = tl.arange(0, QUERIES)[:, None]
    d_1D = tl.arange(0, WIDTH)[None, :]
    asked_G1, in_row_1D = g_G1 < G, d_1D < D
    in_key_1D = in_row_1D & (d_1D >= D - K)
    if ONE_W:
        w_GD = tl.load(w + g_G1 * K + d_1D - (D - K), mask=asked_G1 & in_key_1D, other=0.0)
        d_w_GD = tl.zeros([QUERIES, WIDTH], tl.float32)
    for token in range(first, tl.minimum(first + run, tokens)):
        place_1D = tl.cast(token, tl.int64) * D + d_1D
        at_GD = _at(addresses + 2 * n, tl.minimum(g_G1, G - 1), place_1D, D, read_element)
        g_GD = tl.load(at_GD, mask=asked_G1 & in_row_1D, other=0.0).to(tl.float32)
        lse_G1 = tl.load(lse_GN + g_G1 * tokens + token, mask=asked_G1, other=0.0)
        if PHASE == SECOND:
            h_1D = tl.load(h_ND + place_1D, mask=in_row_1D, other=0.0).to(tl.float32)
            dot_G1 = tl.sum(g_GD * h_1D, 1, keep_dims=True)
            kept_G1 = tl.exp(tl.load(before_N + token + 0 * g_G1) - lse_G1)
            tl.store(d_before_ND + 0 * g_G1 + place_1D, kept_G1 * g_GD, mask=in_row_1D)
            tl.store(d_before_N + token + 0 * g_G1, -kept_G1 * dot_G1)
        else:
            dot_G1 = tl.zeros([QUERIES, 1], tl.float32)
        if ALONE:
            for i in tl.range(0, n, num_stages=STAGES):
                at_1D = _at(addresses, i, place_1D, D, element)
                v_1D = tl.load(at_1D, mask=in_row_1D, other=0.0).to(tl.float32)
                scalar_G1 = (tl.cast(g_G1, tl.int64) * n + i) * tokens + token
                logit_G1 = tl.load(logit_GnN + scalar_G1, mask=asked_G1, other=0.0)
                bias_G1 = tl.load(numbers + n + g_G1 * n + i, mask=asked_G1, other=0.0)
                share_G1 = tl.exp(logit_G1 + bias_G1 - lse_G1) * tl.load(numbers + i)
                dot_G1 += share_G1 * tl.sum(g_GD * v_1D, 1, keep_dims=True)
        if PHASE == FIRST:
            given_G1 = tl.load(dot_GN + g_G1 * tokens + token, mask=asked_G1, other=0.0)
            dot_G1 = tl.where(given_G1 == given_G1, -given_G1, dot_G1)
        for i in tl.range(0, n, num_stages=STAGES):
            at_1D = _at(addresses, i, place_1D, D, element)
            v_1D = tl.load(at_1D, mask=in_row_1D, other=0.0).to(tl.float32)
            scale = tl.load(numbers + i)
            scalar = tl.cast(i, tl.int64) * tokens + token
            scaled_rms = tl.load(inverse_rms_nN + scalar) * scale
            logit_at_G1 = logit_GnN + tl.cast(g_G1, tl.int64) * n * tokens + scalar
            logit_G1 = tl.load(logit_at_G1, mask=asked_G1, other=0.0)
            bias_G1 = tl.load(numbers + n + g_G1 * n + i, mask=asked_G1, other=-float("inf"))
            alpha_G1 = tl.exp(logit_G1 + bias_G1 - lse_G1)
            beta_G1 = tl.sum(g_GD * v_1D, 1, keep_dims=True) * scale
            m_G1 = alpha_G1 * (beta_G1 - dot_G1) * scaled_rms
            pull_11 = tl.sum(m_G1 * logit_G1, 0, keep_dims=True) * scaled_rms / K
            if not ONE_W:
                of_w_GD = (g_G1 * n + i) * K + d_1D - (D - K)
                w_GD = tl.load(w + of_w_GD, mask=asked_G1 & in_key_1D, other=0.0)
            of_key_1D = tl.sum(m_G1 * w_GD, 0, keep_dims=True) - pull_11 * v_1D
            if K < D:
                of_key_1D = tl.where(in_key_1D, of_key_1D, 0.0)
            d_v_1D = tl.sum(alpha_G1 * scale * g_GD, 0, keep_dims=True) + of_key_1D
            at_1D = _at(addresses + n, i, place_1D, D, element)
            tl.store(at_1D, d_v_1D.to(element), mask=in_row_1D)
            if ONE_W:
                d_w_GD += m_G1 * v_1D
            else:
                share = d_w + program.to(tl.int64) * G * n * K + of_w_GD
                in_w_GD = asked_G1 & in_key_1D
                earlier_GD = tl.load(share, mask=in_w_GD & (token > first), other=0.0)
                tl.store(share, earlier_GD + m_G1 * v_1D, mask=in_w_GD)
        if not ONE_W:
            tl.debug_barrier()  # what one thread stored, another may load for the next token
    if ONE_W:
        share = d_w + (program.to(tl.int64) * G + g_G1) * K + d_1D - (D - K)
        tl.store(share, d_w_GD, mask=asked_G1 & in_key_1D)
