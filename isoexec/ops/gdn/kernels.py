"""Triton kernels of `cpr_wy` on sequences: a chunk-parallel pre-pass, the chain over chunks, the tail.

Pool tensors may be views into a page: each comes with the stride of its slot, and slot offsets are int64 (a pool exceeds 2^31
elements). Tables are `state.Plan`'s: sequences [N, 4] = first row, length, start, first chunk; chunks [chunks, 2] = sequence, local.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.ops._core.triton_math import dot
from isoexec.ops.gdn.tiles import (high_plane, join_planes, low_plane, next_state, out_tile, rhs_tile, rows, rowsT,
                                   score_tile, solve_tile)  # fmt: skip


@triton.jit
def prepass_kernel(q, k, g, beta, ring_k, ring_gates, slots, sequences, chunks, G_ws, b_ws, E_ws, T_ws, M_ws,
                   scale, k_slot, gates_slot, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, C: tl.constexpr,
                   LOGC: tl.constexpr, POOL: tl.constexpr):  # fmt: skip
    """Per chunk and key head: G, beta, T, M of its value heads, and E = (e^G, e^G scale, e^{G_C - G}). Reads no state."""
    ic = tl.program_id(0)
    h = tl.program_id(1)
    n = tl.load(chunks + 2 * ic)
    first = tl.load(sequences + 4 * n)
    length = tl.load(sequences + 4 * n + 1)
    t0 = tl.load(sequences + 4 * n + 2) % C
    p0 = tl.load(chunks + 2 * ic + 1) * C - t0  # token of this call at tile row 0; negative: the ring has the first rows
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    lo = tl.maximum(-p0, 0)
    hi = length - p0
    row0 = (first + p0).to(tl.int64)
    kt = rows(k + (row0 * H + h) * K, i, d, H * K, lo, hi)
    qt = rows(q + (row0 * H + h) * K, i, d, H * K, lo, hi)
    slot = row0 * 0
    if POOL:
        slot = tl.load(slots + n).to(tl.int64)
        kt = tl.where((i < lo)[:, None], rows(ring_k + slot * k_slot + h * C * K, i, d, K, 0, lo), kt)
    kk = dot(kt, tl.trans(kt))
    qk = dot(qt, tl.trans(kt))
    for j in tl.static_range(HV // H):
        hv = h * (HV // H) + j
        carry = 0.0
        G = tl.zeros([C], dtype=tl.float32)
        b = tl.load(beta + (row0 + i) * HV + hv, mask=(i >= lo) & (i < hi), other=0.0)
        ring = ring_gates + slot * gates_slot + hv * 2 * C
        if POOL:
            b = tl.where(i < lo, tl.load(ring + C + i, mask=i < lo, other=0.0), b)
        for t in tl.static_range(C):  # one sequential fp32 sum, in every case
            carry = carry + tl.load(g + (row0 + t) * HV + hv, mask=(t >= lo) & (t < hi), other=0.0)
            if POOL:
                carry = tl.where(t < lo, tl.load(ring + t, mask=t < lo, other=0.0), carry)
            G = tl.where(i == t, carry, G)
        w = (ic * HV + hv).to(tl.int64)
        tl.store(G_ws + w * C + i, G)
        tl.store(b_ws + w * C + i, b)
        eG = tl.exp(G)
        tl.store(E_ws + w * 3 * C + i, eG)
        tl.store(E_ws + w * 3 * C + C + i, eG * scale)
        tl.store(E_ws + w * 3 * C + 2 * C + i, tl.exp(carry - G))
        square = i[:, None] * C + i[None, :]
        tl.store(T_ws + w * C * C + square, solve_tile(kk, G, b, C, LOGC))
        tl.store(M_ws + w * C * C + square, score_tile(qk, G, scale, C))


@triton.jit
def _edge_chunk(S, q, k, v, o, u_ws, ring_k, ring_rhs, b_ws, E_ws, T_ws, M_ws, slot, v_row, k_slot, rhs_slot, w, row0, lo, hi, h,
                hv, ov, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
                POOL: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    """A chunk whose rows [0, lo) come from the ring and whose rows [hi, C) are not there yet -> u^T, rhs^T, k."""
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    square = i[:, None] * C + i[None, :]
    kt = rows(k + (row0 * H + h) * K, i, d, H * K, lo, hi)
    qt = rows(q + (row0 * H + h) * K, i, d, H * K, lo, hi)
    vT = rowsT(v + row0 * v_row + hv * V, i, ov, v_row, lo, hi)
    b = tl.load(b_ws + w * C + i)
    eG = tl.load(E_ws + w * 3 * C + i)
    eGs = tl.load(E_ws + w * 3 * C + C + i)
    if POOL:
        kt = tl.where((i < lo)[:, None], rows(ring_k + slot * k_slot + h * C * K, i, d, K, 0, lo), kt)
    S_high = high_plane(S)
    rhsT = rhs_tile(S_high, kt, vT, eG, b)
    if POOL:
        rhsT = tl.where((i < lo)[None, :], rowsT(ring_rhs + slot * rhs_slot + hv * C * V, i, ov, V, 0, lo), rhsT)
    uT = dot(rhsT, tl.trans(tl.load(T_ws + w * C * C + square)))
    oT = out_tile(S_high, qt, uT, tl.load(M_ws + w * C * C + square), eGs)
    at = (row0 * HV + hv) * V + i[None, :] * (HV * V) + ov[:, None]
    mask = ((i >= lo) & (i < hi))[None, :]
    tl.store(o + at, oT.to(o.dtype.element_ty), mask=mask)
    if SAVE:
        tl.store(u_ws + at, uT.to(tl.bfloat16), mask=mask)
    return uT, rhsT, kt


@triton.jit
def _full_chunk(S, c, q, k, v, o, b_ws, E_ws, T_ws, M_ws, u_ws, states, v_row, first, t0, chunk0, h, hv, ov, tile, H: tl.constexpr,
                HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, SAVE: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """A chunk of C rows of this call: writes its outputs -> the state after it."""
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    square = i[:, None] * C + i[None, :]
    w = ((chunk0 + c) * HV + hv).to(tl.int64)
    row0 = (first - t0 + c * C).to(tl.int64)
    at = (row0 * HV + hv) * V + i[None, :] * (HV * V) + ov[:, None]
    kt = tl.load(k + (row0 * H + h) * K + i[:, None] * (H * K) + d[None, :])
    qt = tl.load(q + (row0 * H + h) * K + i[:, None] * (H * K) + d[None, :])
    vT = tl.load(v + row0 * v_row + hv * V + i[None, :] * v_row + ov[:, None])
    b = tl.load(b_ws + w * C + i)
    eG = tl.load(E_ws + w * 3 * C + i)
    eGs = tl.load(E_ws + w * 3 * C + C + i)
    left = tl.load(E_ws + w * 3 * C + 2 * C + i)
    S_high = high_plane(S)
    if EACH:
        tl.store(states + w * V * K + tile, S)
    uT = dot(rhs_tile(S_high, kt, vT, eG, b), tl.trans(tl.load(T_ws + w * C * C + square)))
    oT = out_tile(S_high, qt, uT, tl.load(M_ws + w * C * C + square), eGs)
    tl.store(o + at, oT.to(o.dtype.element_ty))
    if SAVE:
        tl.store(u_ws + at, uT.to(tl.bfloat16))
    return next_state(S, uT, kt, left, tl.load(E_ws + w * 3 * C + C - 1))


@triton.jit
def chain_kernel(q, k, v, o, high, low, ring_k, ring_rhs, slots, sequences, b_ws, E_ws, T_ws, M_ws, u_ws, h_ws, blocks, states,
                 v_row, S_slot, k_slot, rhs_slot, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                 C: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, POOL: tl.constexpr, SAVE: tl.constexpr,
                 EACH: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Per sequence, value head and slice of V: the boundary state through all chunks, and the outputs.

    SAVE keeps u and the state of every BLOCK tokens for the backward, EACH the fp32 state before every chunk that starts here. PART: 0 all
    chunks, 1 the resumed one that this call completes, 2 the one it leaves open; those between are then of another kernel (over a pool).
    """
    iv = tl.program_id(0)
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    first = tl.load(sequences + 4 * n)
    length = tl.load(sequences + 4 * n + 1)
    start = tl.load(sequences + 4 * n + 2)
    chunk0 = tl.load(sequences + 4 * n + 3)
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    ov = iv * BV + tl.arange(0, BV)
    tile = ov[:, None] * K + d[None, :]
    S = tl.zeros([BV, K], dtype=tl.float32)
    t0 = start % C
    slot = (first * 0).to(tl.int64)
    if POOL:
        slot = tl.load(slots + n).to(tl.int64)
        if (start + length if PART == 2 else start) >= C:  # before that a slot's contents belong to nobody
            at = slot * S_slot + hv * V * K
            S = join_planes(tl.load(high + at + tile), tl.load(low + at + tile))
    full = (t0 + length) // C
    c0 = 0
    if POOL:
        c0 = ((t0 > 0) & (full > 0)).to(tl.int32)
        if (0 if PART == 2 else c0) > 0:
            w = (chunk0 * HV + hv).to(tl.int64)
            uT, rhsT, kt = _edge_chunk(S, q, k, v, o, u_ws, ring_k, ring_rhs, b_ws, E_ws, T_ws, M_ws, slot, v_row, k_slot,
                                          rhs_slot, w, (first - t0).to(tl.int64), t0, C, h, hv, ov, H, HV, K, V, C, POOL,
                                          False)  # fmt: skip
            S = next_state(S, uT, kt, tl.load(E_ws + w * 3 * C + 2 * C + i), tl.load(E_ws + w * 3 * C + C - 1))
    if SAVE:
        # Whole blocks first, so that a block's state is stored once and without a mask: c0 is 0 here.
        per: tl.constexpr = BLOCK // C
        block0 = tl.load(blocks + n)
        for group in tl.range(0, full // per, num_stages=STAGES):
            tl.store(h_ws + ((block0 + group).to(tl.int64) * HV + hv) * V * K + tile, high_plane(S))
            for j in tl.static_range(per):
                S = _full_chunk(S, group * per + j, q, k, v, o, b_ws, E_ws, T_ws, M_ws, u_ws, states, v_row, first, t0, chunk0, h, hv, ov,
                                tile, H, HV, K, V, C, SAVE, EACH)  # fmt: skip
        c0 = full // per * per
        if c0 < full:
            tl.store(h_ws + ((block0 + full // per).to(tl.int64) * HV + hv) * V * K + tile, high_plane(S))
    if PART == 0:
        for c in tl.range(c0, full, num_stages=STAGES, loop_unroll_factor=1 if SAVE else UNROLL):
            S = _full_chunk(S, c, q, k, v, o, b_ws, E_ws, T_ws, M_ws, u_ws, states, v_row, first, t0, chunk0, h, hv, ov, tile, H, HV, K, V,
                            C, SAVE, EACH)  # fmt: skip
    elif PART == 1:
        full = c0
    if POOL and PART < 2:
        if full > 0:
            at = slot * S_slot + hv * V * K
            tl.store(high + at + tile, high_plane(S))
            tl.store(low + at + tile, low_plane(S))
    held = 0 if PART == 1 else t0 + length - full * C
    if (held > 0) & (length > 0):  # the open chunk: outputs only, S stays at its boundary
        w = ((chunk0 + full) * HV + hv).to(tl.int64)
        lo = tl.where(full > 0, 0, t0)
        if EACH:
            tl.store(states + w * V * K + tile, S)
        if SAVE:
            block = (tl.load(blocks + n) + full * C // BLOCK).to(tl.int64)
            tl.store(h_ws + (block * HV + hv) * V * K + tile, high_plane(S), mask=((full * C) % BLOCK == 0) & (tile >= 0))
        uT, rhsT, kt = _edge_chunk(S, q, k, v, o, u_ws, ring_k, ring_rhs, b_ws, E_ws, T_ws, M_ws, slot, v_row, k_slot,
                                      rhs_slot, w, (first - t0 + full * C).to(tl.int64), lo, held, h, hv, ov, H, HV, K, V, C,
                                      POOL, SAVE)  # fmt: skip
        if POOL:
            at = slot * rhs_slot + hv * C * V + i[None, :] * V + ov[:, None]
            tl.store(ring_rhs + at, rhsT, mask=((i >= lo) & (i < held))[None, :])


@triton.jit
def tail_kernel(k, ring_k, ring_gates, slots, sequences, G_ws, b_ws, k_slot, gates_slot, H: tl.constexpr, HV: tl.constexpr,
                K: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Append k, G and beta of the open chunk to the ring. Its own launch: pre-pass and chain programs read the old rows."""
    n = tl.program_id(0)
    h = tl.program_id(1)
    first = tl.load(sequences + 4 * n)
    length = tl.load(sequences + 4 * n + 1)
    t0 = tl.load(sequences + 4 * n + 2) % C
    full = (t0 + length) // C
    left = t0 + length - full * C
    if length == 0:
        left = 0
    lo = tl.where(full > 0, 0, t0)
    slot = tl.load(slots + n).to(tl.int64)
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    row0 = (first - t0 + full * C).to(tl.int64)
    new = (i >= lo) & (i < left)
    at = ring_k + slot * k_slot + h * C * K + i[:, None] * K + d[None, :]
    tl.store(at, rows(k + (row0 * H + h) * K, i, d, H * K, lo, left), mask=new[:, None])
    for j in tl.static_range(HV // H):
        hv = h * (HV // H) + j
        w = ((tl.load(sequences + 4 * n + 3) + full) * HV + hv).to(tl.int64)
        ring = ring_gates + slot * gates_slot + hv * 2 * C
        tl.store(ring + i, tl.load(G_ws + w * C + i, mask=new), mask=new)
        tl.store(ring + C + i, tl.load(b_ws + w * C + i, mask=new), mask=new)
