"""Triton kernels of `cpr`: the token recurrence inside chunks, from the boundary states of `cpr_wy` (reference_cpr.py)."""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.ops._core.triton_math import row_sum
from isoexec.ops.gdn.tiles import join_planes


@triton.jit
def _token(S, q, k, v, g, beta, scale, BV: tl.constexpr, K: tl.constexpr, LOGK: tl.constexpr):
    """One token of S [BV, K] fp32; q, k [1, K], v [BV, 1] bf16, g, beta scalars -> S after it, o [BV, 1] fp32."""
    k32 = k.to(tl.float32)
    S = S * tl.exp(g)
    u = (v.to(tl.float32) - row_sum(S * k32, BV, K, LOGK)) * beta
    S = S + u * k32
    return S, row_sum(S * (q.to(tl.float32) * scale), BV, K, LOGK)


@triton.jit
def recur_kernel(q, k, v, g, beta, o, states, now, slots, sequences, chunks, scale, now_slot, H: tl.constexpr, HV: tl.constexpr,
                 K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOGK: tl.constexpr, BV: tl.constexpr,
                 POOL: tl.constexpr):  # fmt: skip
    """Per chunk, value head and slice of V: from ``states`` [chunks, HV, V, K] fp32, or from ``now`` where a chunk is resumed."""
    iv = tl.program_id(0)
    ic = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    n = tl.load(chunks + 2 * ic)
    first = tl.load(sequences + 4 * n)
    length = tl.load(sequences + 4 * n + 1)
    t0 = tl.load(sequences + 4 * n + 2) % C
    p0 = tl.load(chunks + 2 * ic + 1) * C - t0  # token of this call at row 0 of the chunk
    d = tl.arange(0, K)[None, :]
    ov = iv * BV + tl.arange(0, BV)[:, None]
    tile = ov * K + d
    lo = tl.maximum(-p0, 0)
    hi = tl.minimum(length - p0, C)
    slot = (n * 0).to(tl.int64)
    if POOL:
        slot = tl.load(slots + n).to(tl.int64)
    running = now + slot * now_slot + hv * V * K + tile
    boundary = states + (ic * HV + hv).to(tl.int64) * V * K + tile
    if lo > 0:
        S = tl.load(running)
    else:
        S = tl.load(boundary)
    for t in range(lo, hi):
        row = (first + p0 + t).to(tl.int64)
        S, out = _token(S, tl.load(q + (row * H + h) * K + d), tl.load(k + (row * H + h) * K + d), tl.load(v + (row * HV + hv) * V + ov),
                        tl.load(g + row * HV + hv), tl.load(beta + row * HV + hv), scale, BV, K, LOGK)  # fmt: skip
        tl.store(o + (row * HV + hv) * V + ov, out.to(o.dtype.element_ty))
    if POOL:
        if hi < C:
            tl.store(running, S)


@triton.jit
def recur_step_kernel(q, k, v, g, beta, o, high, low, now, slots, positions, scale, null_slot, S_slot, now_slot, H: tl.constexpr,
                      HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOGK: tl.constexpr,
                      BV: tl.constexpr):  # fmt: skip
    """One token of one lane. Follows the launch that advances the boundary state: a chunk's first token reads it, its last writes none."""
    iv = tl.program_id(0)
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    d = tl.arange(0, K)[None, :]
    ov = iv * BV + tl.arange(0, BV)[:, None]
    slot = tl.load(slots + n).to(tl.int64)
    row = n.to(tl.int64)
    out = o + (row * HV + hv) * V + ov
    if (slot < 0) | (slot == null_slot):
        tl.store(out, tl.zeros([BV, 1], dtype=tl.float32).to(o.dtype.element_ty))
    else:
        position = tl.load(positions + n)
        t = position % C
        tile = hv * V * K + ov * K + d
        running = now + slot * now_slot + tile
        at = slot * S_slot + tile
        old = (position >= C) & (t == 0) & (tile >= 0)
        boundary = join_planes(tl.load(high + at, mask=old, other=0.0), tl.load(low + at, mask=old, other=0))
        S = tl.where(t == 0, boundary, tl.load(running, mask=(t > 0) & (tile >= 0), other=0.0))
        S, y = _token(S, tl.load(q + (row * H + h) * K + d), tl.load(k + (row * H + h) * K + d), tl.load(v + (row * HV + hv) * V + ov),
                      tl.load(g + row * HV + hv), tl.load(beta + row * HV + hv), scale, BV, K, LOGK)  # fmt: skip
        tl.store(out, y.to(o.dtype.element_ty))
        tl.store(running, S, mask=(t < C - 1) & (tile >= 0))
