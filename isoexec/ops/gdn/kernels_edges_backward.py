"""Triton kernels of the backward around the core: convolution with silu, l2norm, gating.

A program owns a run of tokens and sums its part of a weight's gradient in registers; parts are added by one more launch: no atomics, the
same bits in every run. The forward is recomputed by the tile function that the forward runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.ops._core.triton_math import sigmoid, softplus


@triton.jit
def _shifted(x, x_row, t, p, c, real, back: tl.constexpr):
    """Rows t - back of the same sequence, +0.0 before its start."""
    return tl.load(x + (t - back).to(tl.int64)[:, None] * x_row + c[None, :], mask=(real & (p >= back))[:, None], other=0.0).to(tl.float32)


@triton.jit
def channels_back_kernel(x, weight, dq, dk, dv, ds, weight_part, tokens, T, x_row, steps, eps, H: tl.constexpr, HV: tl.constexpr,
                         K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """One head's channels over ``steps`` tiles of R tokens: dL/d(sum of taps) [T, D] bf16, the run's part of dweight [runs, W, D].

    With NORM the first 2 H heads are l2-normalised. W is 4: a tap is one accumulator.
    """
    D: tl.constexpr = 2 * H * K + HV * V
    N: tl.constexpr = K if K > V else V
    run = tl.program_id(0)
    head = tl.program_id(1)
    n = tl.arange(0, N)
    key = head < 2 * H
    width = tl.where(key, K, V)
    c = tl.where(key, head * K, 2 * H * K + (head - 2 * H) * V) + n
    inside = n < width
    grad = dv + (head - 2 * H) * V
    row_size = HV * V
    if head < H:
        grad = dq + head * K
        row_size = H * K
    elif key:
        grad = dk + (head - H) * K
        row_size = H * K
    w0 = tl.load(weight + c * W, mask=inside, other=0.0).to(tl.float32)[None, :]
    w1 = tl.load(weight + c * W + 1, mask=inside, other=0.0).to(tl.float32)[None, :]
    w2 = tl.load(weight + c * W + 2, mask=inside, other=0.0).to(tl.float32)[None, :]
    w3 = tl.load(weight + c * W + 3, mask=inside, other=0.0).to(tl.float32)[None, :]
    a0 = tl.zeros([R, N], dtype=tl.float32)
    a1 = tl.zeros([R, N], dtype=tl.float32)
    a2 = tl.zeros([R, N], dtype=tl.float32)
    a3 = tl.zeros([R, N], dtype=tl.float32)
    for step in tl.range(steps):
        t = (run * steps + step) * R + tl.arange(0, R)
        real = t < T
        p = tl.load(tokens + 2 * t + 1, mask=real, other=0)
        here = real[:, None] & inside[None, :]
        x0 = _shifted(x, x_row, t, p, c, real, 3)
        x1 = _shifted(x, x_row, t, p, c, real, 2)
        x2 = _shifted(x, x_row, t, p, c, real, 1)
        x3 = _shifted(x, x_row, t, p, c, real, 0)
        s = x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3
        sig = 1.0 / (1.0 + tl.exp(-s))  # a gradient: the fast division will do
        g = tl.load(grad + t.to(tl.int64)[:, None] * row_size + n[None, :], mask=here, other=0.0).to(tl.float32)
        if NORM:
            if key:
                y = (s * sig).to(tl.bfloat16).to(tl.float32)
                y = tl.where(here, y, 0.0)
                r = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
                g = r * (g - y * (r * r * tl.sum(g * y, 1)[:, None]))
        g = g * (sig * (1.0 + s * (1.0 - sig)))
        tl.store(ds + t.to(tl.int64)[:, None] * D + c[None, :], g.to(ds.dtype.element_ty), mask=here)
        g = tl.where(here, g, 0.0)
        a0 += g * x0
        a1 += g * x1
        a2 += g * x2
        a3 += g * x3
    part = weight_part + run.to(tl.int64) * W * D + c
    tl.store(part, tl.sum(a0, 0), mask=inside)
    tl.store(part + D, tl.sum(a1, 0), mask=inside)
    tl.store(part + 2 * D, tl.sum(a2, 0), mask=inside)
    tl.store(part + 3 * D, tl.sum(a3, 0), mask=inside)


@triton.jit
def taps_back_kernel(ds, weight, dx, tokens, sequences, T, D: tl.constexpr, W: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """dx_t = sum over taps of w_j ds_{t + W - 1 - j} inside the sequence."""
    t = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * N + tl.arange(0, N)
    real = t < T
    left = tl.load(sequences + 4 * tl.load(tokens + 2 * t, mask=real, other=0) + 1, mask=real, other=0)
    left -= tl.load(tokens + 2 * t + 1, mask=real, other=0)  # rows to the sequence's end, this one included
    total = tl.zeros([R, N], dtype=tl.float32)
    for ahead in tl.static_range(W):
        value = tl.load(ds + (t + ahead).to(tl.int64)[:, None] * D + c[None, :], mask=(real & (left > ahead))[:, None], other=0.0)
        total += value.to(tl.float32) * tl.load(weight + c * W + W - 1 - ahead).to(tl.float32)[None, :]
    tl.store(dx + t.to(tl.int64)[:, None] * D + c[None, :], total.to(dx.dtype.element_ty), mask=real[:, None])


@triton.jit
def gating_back_kernel(a, b, A_log, dt_bias, dg, dbeta, da, db, parts, T, a_row, b_row, HV: tl.constexpr, R: tl.constexpr):
    """da, db [T, HV]; the run's part of dA_log and ddt_bias, [2, runs, HV]."""
    run = tl.program_id(0)
    hv = tl.program_id(1)
    t = (run * R + tl.arange(0, R)).to(tl.int64)
    real = t < T
    x = tl.load(a + t * a_row + hv, mask=real, other=0.0).to(tl.float32) + tl.load(dt_bias + hv)
    decay = 0.0 - tl.exp(tl.load(A_log + hv))
    d = tl.where(real, tl.load(dg + t * HV + hv, mask=real, other=0.0) * decay, 0.0)
    slope = d * sigmoid(x)
    tl.store(da + t * HV + hv, slope.to(da.dtype.element_ty), mask=real)
    s = sigmoid(tl.load(b + t * b_row + hv, mask=real, other=0.0).to(tl.float32))
    e = tl.load(dbeta + t * HV + hv, mask=real, other=0.0) * (s * (1.0 - s))
    tl.store(db + t * HV + hv, e.to(db.dtype.element_ty), mask=real)
    runs = tl.num_programs(0)
    tl.store(parts + run * HV + hv, tl.sum(d * softplus(x), 0))
    tl.store(parts + (runs + run) * HV + hv, tl.sum(slope, 0))


@triton.jit
def l2norm_back_kernel(x, dy, dx, rows, heads, x_row, eps, K: tl.constexpr, P: tl.constexpr, R: tl.constexpr):
    """Rows of K padded to P; x is [T, heads, K] with any token stride, dy and dx are contiguous."""
    r = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    d = tl.arange(0, P)
    mask = (r < rows)[:, None] & (d < K)[None, :]
    y = tl.load(x + (r // heads * x_row + r % heads * K)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + r[:, None] * K + d[None, :], mask=mask, other=0.0).to(tl.float32)
    f = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    g = f * (g - y * (f * f * tl.sum(g * y, 1)[:, None]))
    tl.store(dx + r[:, None] * K + d[None, :], g.to(dx.dtype.element_ty), mask=mask)
