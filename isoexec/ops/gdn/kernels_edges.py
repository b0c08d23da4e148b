"""Triton kernels around the core: convolution, l2norm, gating, and the fusions of them that leave every rounding where it is."""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.ops._core.triton_math import row_sum, rsqrt, sigmoid, silu, softplus


@triton.jit
def unit_factor(y, eps, R: tl.constexpr, K: tl.constexpr, LOGK: tl.constexpr):
    """bf16 [R, K] -> rsqrt(sum y^2 + eps), [R, 1]"""
    y32 = y.to(tl.float32)
    return rsqrt(row_sum(y32 * y32, R, K, LOGK) + eps)


@triton.jit
def _normalise(y, eps, R: tl.constexpr, K: tl.constexpr, LOGK: tl.constexpr):
    """bf16 [R, K] -> bf16(y rsqrt(sum y^2 + eps))"""
    return (y.to(tl.float32) * unit_factor(y, eps, R, K, LOGK)).to(tl.bfloat16)


@triton.jit
def gates(a, b, A_log, dt_bias):
    g = 0.0 - tl.exp(A_log) * softplus(a.to(tl.float32) + dt_bias)
    return g, sigmoid(b.to(tl.float32))


@triton.jit
def _conv_tile(x, x_row, weight, window, tokens, sequences, t, real, c, D: tl.constexpr, W: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Rows t [R] of channels c [N]: taps added oldest first, then silu, one rounding -> [R, N] bf16."""
    n = tl.load(tokens + 2 * t, mask=real, other=0)
    p = tl.load(tokens + 2 * t + 1, mask=real, other=0)
    fresh = tl.load(sequences + 4 * n + 2, mask=real, other=0) == 0
    for j in tl.static_range(W):
        inside = real & (p >= W - 1 - j)
        value = tl.load(x + (t - (W - 1 - j)).to(tl.int64)[:, None] * x_row + c[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        if HAS_WINDOW and j < W - 1:
            old = real & (p < W - 1 - j) & (fresh == 0)
            at = (n.to(tl.int64) * (W - 1) + p + j)[:, None] * D + c[None, :]
            value = tl.where(old[:, None], tl.load(window + at, mask=old[:, None], other=0.0).to(tl.float32), value)
        term = value * tl.load(weight + c * W + j).to(tl.float32)[None, :]
        if j == 0:
            total = term
        else:
            total = total + term
    return silu(total).to(tl.bfloat16)


@triton.jit
def _conv_rows(x, x_row, weight, y, first, c, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr):
    """Rows first .. first + R - 1 of one sequence, all of whose taps are rows of this call: each is read once, and held for those after."""
    taps = ()
    held = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(weight + c * W + j).to(tl.float32),)
    for j in tl.static_range(W - 1):
        held = held + (tl.load(x + (first - (W - 1 - j)).to(tl.int64) * x_row + c).to(tl.float32),)
    for step in range(R // AHEAD):
        at = (first + step * AHEAD).to(tl.int64)
        new = ()
        for r in tl.static_range(AHEAD):
            new = new + (tl.load(x + (at + r) * x_row + c),)
        for r in tl.static_range(AHEAD):
            held = held + (new[r].to(tl.float32),)
            total = held[0] * taps[0]
            left = ()
            for j in tl.static_range(1, W):
                total = total + held[j] * taps[j]
                left = left + (held[j],)
            held = left
            tl.store(y + (at + r) * D + c, silu(total).to(tl.bfloat16))


@triton.jit
def conv_kernel(x, weight, window, y, tokens, sequences, T, x_row, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
                AHEAD: tl.constexpr, HAS_WINDOW: tl.constexpr):  # fmt: skip
    """R rows of N channels, AHEAD of them at a time."""
    c = tl.program_id(1) * N + tl.arange(0, N)
    first = tl.program_id(0) * R
    p = tl.load(tokens + 2 * first + 1)
    last = tl.load(tokens + 2 * (first + R - 1) + 1, mask=first + R <= T, other=-1)
    if (p >= W - 1) & (last == p + R - 1):
        _conv_rows(x, x_row, weight, y, first, c, D, W, R, AHEAD)
    else:
        for step in range(R // AHEAD):
            t = first + step * AHEAD + tl.arange(0, AHEAD)
            tile = _conv_tile(x, x_row, weight, window, tokens, sequences, t, t < T, c, D, W, HAS_WINDOW)
            tl.store(y + t.to(tl.int64)[:, None] * D + c[None, :], tile, mask=(t < T)[:, None])


@triton.jit
def inputs_kernel(x, a, b, weight, window, A_log, dt_bias, q, k, v, g, beta, tokens, sequences, T, x_row, a_row, b_row, eps,
                  H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
                  LOGK: tl.constexpr, HAS_WINDOW: tl.constexpr):  # fmt: skip
    """Everything between the projections and the core: one head's channels (or the gates of all heads) per program column."""
    D: tl.constexpr = 2 * H * K + HV * V
    t = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1)
    real = t < T
    row = t.to(tl.int64)[:, None]
    if column < 2 * H:
        d = tl.arange(0, K)
        tile = _conv_tile(x, x_row, weight, window, tokens, sequences, t, real, column * K + d, D, W, HAS_WINDOW)
        tile = _normalise(tile, eps, R, K, LOGK)
        if column < H:
            tl.store(q + (row * H + column) * K + d[None, :], tile, mask=real[:, None])
        else:
            tl.store(k + (row * H + column - H) * K + d[None, :], tile, mask=real[:, None])
    elif column < 2 * H + HV:
        e = tl.arange(0, V)
        hv = column - 2 * H
        tile = _conv_tile(x, x_row, weight, window, tokens, sequences, t, real, 2 * H * K + hv * V + e, D, W, HAS_WINDOW)
        tl.store(v + (row * HV + hv) * V + e[None, :], tile, mask=real[:, None])
    else:
        for hv in range(HV):
            at = t.to(tl.int64)
            g_t, b_t = gates(tl.load(a + at * a_row + hv, mask=real, other=0.0), tl.load(b + at * b_row + hv, mask=real, other=0.0),
                              tl.load(A_log + hv), tl.load(dt_bias + hv))  # fmt: skip
            tl.store(g + at * HV + hv, g_t, mask=real)
            tl.store(beta + at * HV + hv, b_t, mask=real)


@triton.jit
def window_kernel(x, window, out, sequences, x_row, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The last W-1 inputs of each sequence, from the old window where the piece is shorter."""
    n = tl.program_id(0)
    c = tl.program_id(1) * N + tl.arange(0, N)
    first = tl.load(sequences + 4 * n)
    length = tl.load(sequences + 4 * n + 1)
    fresh = tl.load(sequences + 4 * n + 2) == 0
    for j in tl.static_range(W - 1):
        p = length - (W - 1) + j
        value = tl.load(x + (first + p).to(tl.int64) * x_row + c, mask=(c >= 0) & (p >= 0), other=0.0)
        if HAS_WINDOW:
            old = (c >= 0) & (p < 0) & (fresh == 0)
            at = (n * (W - 1) + p + (W - 1)).to(tl.int64) * D
            value = tl.where(old, tl.load(window + at + c, mask=old, other=0.0), value)
        tl.store(out + (n * (W - 1) + j).to(tl.int64) * D + c, value)


@triton.jit
def conv_step_tile(x, weight, window, c, D: tl.constexpr, W: tl.constexpr):
    """One token of channels c [1, N]: convolves and shifts the window in place -> [1, N] bf16."""
    new = tl.load(x + c)
    for j in tl.static_range(W - 1):
        value = tl.load(window + j * D + c)
        term = value.to(tl.float32) * tl.load(weight + c * W + j).to(tl.float32)
        if j == 0:
            total = term
        else:
            total = total + term
            tl.store(window + (j - 1) * D + c, value)
    total = total + new.to(tl.float32) * tl.load(weight + c * W + W - 1).to(tl.float32)
    tl.store(window + (W - 2) * D + c, new)
    return silu(total).to(tl.bfloat16)


@triton.jit
def conv_step_kernel(x, weight, window, y, slots, null_slot, x_row, window_slot, D: tl.constexpr, W: tl.constexpr, N: tl.constexpr):
    n = tl.program_id(0)
    c = (tl.program_id(1) * N + tl.arange(0, N))[None, :]
    slot = tl.load(slots + n).to(tl.int64)
    if (slot < 0) | (slot == null_slot):
        tl.store(y + n * D + c, tl.zeros([1, N], dtype=tl.bfloat16))
    else:
        tl.store(y + n * D + c, conv_step_tile(x + n.to(tl.int64) * x_row, weight, window + slot * window_slot, c, D, W))


@triton.jit
def step_inputs_kernel(x, a, b, weight, window, A_log, dt_bias, q, k, v, g, beta, slots, null_slot, x_row, a_row, b_row, window_slot,
                       eps, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
                       LOGK: tl.constexpr):  # fmt: skip
    """`inputs_kernel` for one token per lane. Inert lanes write +0.0."""
    D: tl.constexpr = 2 * H * K + HV * V
    n = tl.program_id(0)
    column = tl.program_id(1)
    slot = tl.load(slots + n).to(tl.int64)
    live = (slot >= 0) & (slot != null_slot)
    xn = x + n.to(tl.int64) * x_row
    wn = window + slot * window_slot
    if column < 2 * H:
        d = tl.arange(0, K)[None, :]
        tile = tl.zeros([1, K], dtype=tl.bfloat16)
        if live:
            tile = _normalise(conv_step_tile(xn, weight, wn, column * K + d, D, W), eps, 1, K, LOGK)
        if column < H:
            tl.store(q + (n * H + column) * K + d, tile)
        else:
            tl.store(k + (n * H + column - H) * K + d, tile)
    elif column < 2 * H + HV:
        e = tl.arange(0, V)[None, :]
        hv = column - 2 * H
        tile = tl.zeros([1, V], dtype=tl.bfloat16)
        if live:
            tile = conv_step_tile(xn, weight, wn, 2 * H * K + hv * V + e, D, W)
        tl.store(v + (n * HV + hv) * V + e, tile)
        g_t, b_t = gates(tl.load(a + n.to(tl.int64) * a_row + hv), tl.load(b + n.to(tl.int64) * b_row + hv), tl.load(A_log + hv),
                          tl.load(dt_bias + hv))  # fmt: skip
        tl.store(g + n * HV + hv, g_t)
        tl.store(beta + n * HV + hv, b_t)


@triton.jit
def gating_kernel(a, b, A_log, dt_bias, g, beta, T, a_row, b_row, HV: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    """R rows of HV <= P heads."""
    t = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    hv = tl.arange(0, P)[None, :]
    real = (t < T) & (hv < HV)
    g_t, b_t = gates(tl.load(a + t * a_row + hv, mask=real, other=0.0), tl.load(b + t * b_row + hv, mask=real, other=0.0),
                      tl.load(A_log + hv, mask=hv < HV, other=0.0), tl.load(dt_bias + hv, mask=hv < HV, other=0.0))  # fmt: skip
    tl.store(g + t * HV + hv, g_t, mask=real)
    tl.store(beta + t * HV + hv, b_t, mask=real)


@triton.jit
def l2norm_kernel(x, y, rows, heads, x_row, eps, K: tl.constexpr, P: tl.constexpr, LOGP: tl.constexpr, R: tl.constexpr):
    """Rows of K, padded with +0.0 to P = 2**LOGP; x is [T, heads, K] with any token stride."""
    r = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    d = tl.arange(0, P)
    mask = (r < rows)[:, None] & (d < K)[None, :]
    tile = tl.load(x + (r // heads * x_row + r % heads * K)[:, None] + d[None, :], mask=mask, other=0.0)
    tl.store(y + r[:, None] * K + d[None, :], _normalise(tile, eps, R, P, LOGP), mask=mask)
