"""Triton kernels of a decode step of `cpr_wy`: one token per lane, in one launch or two.

Row t of the chunk is computed at its own tile position with the products of the chain. S meets k_t and q_t alone: the right-hand sides of
earlier rows are in the ring. With RAW, q and k are convolved channels not yet normalised, and g and beta the projections a and b; with
CONV the channels are not yet convolved either; with GATED the gated norm follows. None of it moves a rounding: the tile functions are
those of kernels_edges.py, and the norm is that of ops/norm. Pool tensors may be views into a page (kernels.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.ops._core.triton_math import column, dot, dot_add, row_sum, rsqrt, silu
from isoexec.ops.gdn.kernels_edges import conv_step_tile, gates, unit_factor
from isoexec.ops.gdn.tiles import high_plane, join_planes, low_plane, next_state, rows, rowsT, score_tile, solve_tile


@triton.jit
def _unit(x, eps, K: tl.constexpr, LOGK: tl.constexpr, RAW: tl.constexpr):
    """[1, K] bf16 -> the l2-normalised row, and its factor."""
    factor = 1.0
    if RAW:
        factor = unit_factor(x, eps, 1, K, LOGK)
        x = (x.to(tl.float32) * factor).to(tl.bfloat16)
    return x, factor


@triton.jit
def _gate(g, beta, A_log, dt_bias, at, hv, RAW: tl.constexpr):
    g_t = tl.load(g + at)
    b_t = tl.load(beta + at)
    if RAW:
        g_t, b_t = gates(g_t, b_t, tl.load(A_log + hv), tl.load(dt_bias + hv))
    return g_t, b_t


@triton.jit
def _fill(high, low, base, live, ring_kh, kn, factor, uT, G, last, ov, K: tl.constexpr, C: tl.constexpr, RAW: tl.constexpr):
    """Advance S past the chunk that just filled, in slices of K: an element's bits do not depend on the slice, registers do.

    A chunk of 64 takes K whole: the products of slices of 32 come out wrong there (Triton 3.6, warp-group products in a loop).
    """
    SLICE: tl.constexpr = K if C > 32 or K < 32 else 32
    i = tl.arange(0, C)
    tl.debug_barrier()  # every warp has read its part of the high plane before any of it is overwritten
    for start in tl.range(0, K, SLICE, num_stages=1):
        d = start + tl.arange(0, SLICE)
        at = base + ov[:, None] * K + d[None, :]
        mask = live & (at >= 0)
        new = tl.load(kn + d)[None, :]
        if RAW:
            new = (new.to(tl.float32) * factor).to(tl.bfloat16)
        kt = tl.where((i == C - 1)[:, None], new, rows(ring_kh, i, d, K, 0, C - 1))
        S = join_planes(tl.load(high + at, mask=mask, other=0.0), tl.load(low + at, mask=mask, other=0))
        S = next_state(S, uT, kt, tl.exp(last - G), tl.exp(last))
        tl.store(high + at, high_plane(S))
        tl.store(low + at, low_plane(S))


@triton.jit
def decode_kernel(q, k, v, g, beta, A_log, dt_bias, o, high, low, ring_k, ring_rhs, ring_gates, slots, positions, scale, eps,
                  null_slot, qk_row, v_row, g_row, beta_row, S_slot, k_slot, rhs_slot, gates_slot, H: tl.constexpr, HV: tl.constexpr,
                  K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOGC: tl.constexpr, LOGK: tl.constexpr, BV: tl.constexpr,
                  RAW: tl.constexpr):  # fmt: skip
    """One token of one lane, value head and slice of V. Reads the high plane only; writes S when the chunk fills."""
    iv = tl.program_id(0)
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    ov = iv * BV + tl.arange(0, BV)
    # What needs no slot is asked for before the slot is known: one lane is a chain of latencies.
    slot = tl.load(slots + n).to(tl.int64)
    position = tl.load(positions + n)
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    row = n.to(tl.int64)
    k_at = k + row * qk_row + h * K
    kn = tl.load(k_at + d)[None, :]
    qn = tl.load(q + row * qk_row + h * K + d)[None, :]
    vn = tl.load(v + row * v_row + hv * V + ov).to(tl.float32)
    g_t, b_t = _gate(g + row * g_row, beta + row * beta_row, A_log, dt_bias, hv, hv, RAW)
    out = o + row * HV * V + hv * V + ov
    if (slot < 0) | (slot == null_slot):
        tl.store(out, tl.zeros([BV], dtype=tl.float32).to(o.dtype.element_ty))
    else:
        t = position % C
        at = slot * S_slot + hv * V * K + ov[:, None] * K + d[None, :]
        live = (position >= C) & (at >= 0)
        here = i == t
        ring = ring_gates + slot * gates_slot + hv * 2 * C
        ring_kh = ring_k + slot * k_slot + h * C * K
        ring_rhsh = ring_rhs + slot * rhs_slot + hv * C * V
        before = tl.load(ring + t - 1, mask=t > 0, other=0.0)
        G = tl.load(ring + i, mask=i < t, other=0.0)
        b = tl.load(ring + C + i, mask=i < t, other=0.0)
        kt = rows(ring_kh, i, d, K, 0, t)
        S_high = tl.load(high + at, mask=live, other=0.0)
        rhsT = rowsT(ring_rhsh, i, ov, V, 0, t)
        kn, factor = _unit(kn, eps, K, LOGK, RAW)
        qn, _ = _unit(qn, eps, K, LOGK, RAW)
        kt = tl.where(here[:, None], kn, kt)
        G_t = before + g_t
        G = tl.where(i < t, G, G_t)
        b = tl.where(here, b_t, b)
        T = solve_tile(dot(kt, tl.trans(kt)), G, b, C, LOGC)
        qt = tl.where(here[:, None], qn, tl.zeros([C, K], dtype=tl.bfloat16))
        M = score_tile(dot(qt, tl.trans(kt)), G, scale, C)
        j = tl.arange(0, 16)
        pair = tl.where((j == 0)[:, None], kn, tl.where((j == 1)[:, None], qn, 0.0)).to(tl.bfloat16)
        Skq = dot(S_high, tl.trans(pair))  # [BV, 16]: S k_t and S q_t
        ks = column(Skq, (j == 0)[None, :], 1)
        qs = column(Skq, (j == 1)[None, :], 1)
        rhs_t = ((vn - ks * tl.exp(G_t)) * b_t).to(tl.bfloat16)
        rhsT = tl.where(here[None, :], rhs_t[:, None], rhsT)
        uT = dot(rhsT, tl.trans(T))
        acc = tl.where(here[None, :], (qs * (tl.exp(G_t) * scale))[:, None], 0.0)
        oT = dot_add(uT.to(tl.bfloat16), tl.trans(M), acc)
        tl.store(out, column(oT, here[None, :], 1).to(o.dtype.element_ty))
        if t == C - 1:
            base = slot * S_slot + hv * V * K
            _fill(high, low, base, position >= C, ring_kh, k_at, factor, uT, G, G_t, ov, K, C, RAW)
        else:
            tl.store(ring_rhsh + t * V + ov, rhs_t)
            if iv == 0:
                tl.store(ring + t, G_t)
                tl.store(ring + C + t, b_t)
                if hv % (HV // H) == 0:
                    tl.store(ring_kh + t * K + d[None, :], kn)


@triton.jit
def decode_pre_kernel(q, k, v, g, beta, A_log, dt_bias, weight, window, q_ws, k_ws, v_ws, ring_k, ring_gates, slots, positions, T_ws,
                      M_ws, scale, eps, null_slot, qk_row, g_row, beta_row, window_slot, k_slot, gates_slot, H: tl.constexpr,
                      HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOGC: tl.constexpr, LOGK: tl.constexpr,
                      W: tl.constexpr, RAW: tl.constexpr, CONV: tl.constexpr):  # fmt: skip
    """First of two launches, per lane and key head: appends k, G and beta, and computes T and row t of M. Reads no state.

    With RAW the normalised q and k go to q_ws and k_ws; with CONV q, k and v are the same rows of channels, and the convolved values go
    to v_ws.
    """
    n = tl.program_id(0)
    h = tl.program_id(1)
    D: tl.constexpr = 2 * H * K + HV * V
    slot = tl.load(slots + n).to(tl.int64)
    if (slot >= 0) & (slot != null_slot):
        t = tl.load(positions + n) % C
        i = tl.arange(0, C)
        d = tl.arange(0, K)
        row = n.to(tl.int64)
        here = i == t
        if CONV:
            x = q + row * qk_row
            past = window + slot * window_slot
            kn = conv_step_tile(x, weight, past, (H + h) * K + d[None, :], D, W)
            qn = conv_step_tile(x, weight, past, h * K + d[None, :], D, W)
            e = tl.arange(0, V)[None, :]
            for j in tl.static_range(HV // H):
                hv = h * (HV // H) + j
                tl.store(v_ws + (row * HV + hv) * V + e, conv_step_tile(x, weight, past, 2 * H * K + hv * V + e, D, W))
        else:
            kn = tl.load(k + row * qk_row + h * K + d[None, :])
            qn = tl.load(q + row * qk_row + h * K + d[None, :])
        kn, _ = _unit(kn, eps, K, LOGK, RAW)
        qn, _ = _unit(qn, eps, K, LOGK, RAW)
        if RAW:
            tl.store(q_ws + (row * H + h) * K + d[None, :], qn)
            tl.store(k_ws + (row * H + h) * K + d[None, :], kn)
        ring_kh = ring_k + slot * k_slot + h * C * K
        kt = tl.where(here[:, None], kn, rows(ring_kh, i, d, K, 0, t))
        kk = dot(kt, tl.trans(kt))
        qt = tl.where(here[:, None], qn, tl.zeros([C, K], dtype=tl.bfloat16))
        qk = dot(qt, tl.trans(kt))
        tl.store(ring_kh + t * K + d[None, :], kn)
        for j in tl.static_range(HV // H):
            hv = h * (HV // H) + j
            ring = ring_gates + slot * gates_slot + hv * 2 * C
            g_t, b_t = _gate(g + row * g_row, beta + row * beta_row, A_log, dt_bias, hv, hv, RAW)
            G_t = tl.load(ring + t - 1, mask=t > 0, other=0.0) + g_t
            G = tl.where(i < t, tl.load(ring + i, mask=i < t, other=0.0), G_t)
            b = tl.where(here, b_t, tl.load(ring + C + i, mask=i < t, other=0.0))
            w = (n * HV + hv).to(tl.int64) * C * C
            square = i[:, None] * C + i[None, :]
            tl.store(T_ws + w + square, solve_tile(kk, G, b, C, LOGC))
            tl.store(M_ws + w + square, score_tile(qk, G, scale, C), mask=here[:, None] & (square >= 0))
            tl.store(ring + t, G_t)
            tl.store(ring + C + t, b_t)


@triton.jit
def _gated_norm(o, z, weight, eps, V: tl.constexpr, LOGV: tl.constexpr):
    """ops/norm's gated RMSNorm of one rounded row o [V], gate z [V] -> [1, V] fp32."""
    e = tl.arange(0, V)[None, :]
    x = o.to(tl.float32)[None, :]
    mean = tl.div_rn(row_sum(x * x, 1, V, LOGV), tl.full([1, 1], V, tl.float32))
    return x * rsqrt(mean + eps) * tl.load(weight + e).to(tl.float32) * silu(tl.load(z + e).to(tl.float32))


@triton.jit
def decode_main_kernel(q, k, v, o, z, norm_weight, high, low, ring_k, ring_rhs, ring_gates, slots, positions, T_ws, M_ws, scale, norm_eps,
                       null_slot, v_row, z_row, S_slot, k_slot, rhs_slot, gates_slot, H: tl.constexpr, HV: tl.constexpr,
                       K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, LOGV: tl.constexpr, BV: tl.constexpr,
                       GATED: tl.constexpr):  # fmt: skip
    """Second of two launches, per lane, value head and slice of V: what `decode_kernel` does with S. GATED needs BV = V."""
    iv = tl.program_id(0)
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    ov = iv * BV + tl.arange(0, BV)
    slot = tl.load(slots + n).to(tl.int64)
    out = o + (n * HV + hv).to(tl.int64) * V + ov
    if (slot < 0) | (slot == null_slot):
        tl.store(out, tl.zeros([BV], dtype=tl.float32).to(o.dtype.element_ty))
    else:
        position = tl.load(positions + n)
        t = position % C
        i = tl.arange(0, C)
        d = tl.arange(0, K)
        at = slot * S_slot + hv * V * K + ov[:, None] * K + d[None, :]
        live = (position >= C) & (at >= 0)
        S_high = tl.load(high + at, mask=live, other=0.0)
        j = tl.arange(0, 16)
        kn = tl.load(k + (n * H + h) * K + d[None, :] + j[:, None] * 0, mask=(j == 0)[:, None] & (d >= 0)[None, :], other=0.0)
        qn = tl.load(q + (n * H + h) * K + d[None, :] + j[:, None] * 0, mask=(j == 1)[:, None] & (d >= 0)[None, :], other=0.0)
        pair = tl.where((j == 0)[:, None], kn, qn)
        vn = tl.load(v + n.to(tl.int64) * v_row + hv * V + ov).to(tl.float32)
        ring_rhsh = ring_rhs + slot * rhs_slot + hv * C * V
        rhsT = rowsT(ring_rhsh, i, ov, V, 0, t)
        ring = ring_gates + slot * gates_slot + hv * 2 * C
        G_t = tl.load(ring + t)
        b_t = tl.load(ring + C + t)
        w = (n * HV + hv).to(tl.int64) * C * C
        square = i[:, None] * C + i[None, :]
        here = i == t
        T = tl.load(T_ws + w + square)
        M = tl.load(M_ws + w + square, mask=here[:, None] & (square >= 0), other=0.0)
        Skq = dot(S_high, tl.trans(pair))
        ks = column(Skq, (j == 0)[None, :], 1)
        qs = column(Skq, (j == 1)[None, :], 1)
        rhs_t = ((vn - ks * tl.exp(G_t)) * b_t).to(tl.bfloat16)
        rhsT = tl.where(here[None, :], rhs_t[:, None], rhsT)
        uT = dot(rhsT, tl.trans(T))
        acc = tl.where(here[None, :], (qs * (tl.exp(G_t) * scale))[:, None], 0.0)
        oT = dot_add(uT.to(tl.bfloat16), tl.trans(M), acc)
        o_t = column(oT, here[None, :], 1)
        if GATED:
            gate = z + n.to(tl.int64) * z_row + hv * V
            y = _gated_norm(o_t.to(tl.bfloat16), gate, norm_weight, norm_eps, V, LOGV)
            tl.store(out[None, :], y.to(o.dtype.element_ty))
        else:
            tl.store(out, o_t.to(o.dtype.element_ty))
        if t == C - 1:
            base = slot * S_slot + hv * V * K
            ring_kh = ring_k + slot * k_slot + h * C * K
            _fill(high, low, base, position >= C, ring_kh, k + (n * H + h) * K, 1.0, uT, tl.load(ring + i), G_t, ov, K, C, False)
        else:
            tl.store(ring_rhsh + t * V + ov, rhs_t)
