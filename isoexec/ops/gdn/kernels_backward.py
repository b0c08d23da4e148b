"""Triton kernels of the backward of `cpr_wy`.

Gradients need the same bits from run to run, not between runtimes, so the work is cut as is fastest: a chain over chunks carries
dL/dS backwards and yields dL/drhs; everything else is parallel over blocks of BLOCK tokens, from the state that the forward kept at
each block's start. u, the solution of the solve, does not depend on where chunks begin, so blocks need no solve of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.ops._core.triton_math import dot, dot_add
from isoexec.ops.gdn.tiles import rows, rowsT


@triton.jit
def _back_step(dS, kt, qt, doT, b, E_ws, T_ws, M_ws, w, C: tl.constexpr):
    """One chunk backwards: dL/dS' -> (dL/dS, dL/drhs^T)."""
    i = tl.arange(0, C)
    square = i[:, None] * C + i[None, :]
    eG = tl.load(E_ws + w * 3 * C + i)
    eGs = tl.load(E_ws + w * 3 * C + C + i)
    left = tl.load(E_ws + w * 3 * C + 2 * C + i)
    eC = tl.load(E_ws + w * 3 * C + C - 1)
    duT = dot(dS.to(tl.bfloat16), tl.trans(kt)) * left[None, :]
    duT = dot_add(doT, tl.load(M_ws + w * C * C + square), duT)
    drhsT = dot(duT.to(tl.bfloat16), tl.load(T_ws + w * C * C + square))
    dS = dot_add((doT.to(tl.float32) * eGs[None, :]).to(tl.bfloat16), qt, dS * eC)
    dS = dot_add((drhsT * (0.0 - b * eG)[None, :]).to(tl.bfloat16), kt, dS)
    return dS, drhsT


@triton.jit
def _back_chunk(dS, c, q, k, do, drhs, b_ws, E_ws, T_ws, M_ws, first, chunk0, h, hv, ov, H: tl.constexpr, HV: tl.constexpr,
                K: tl.constexpr, V: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """`_back_step` of a chunk of C rows; writes its drhs."""
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    w = ((chunk0 + c) * HV + hv).to(tl.int64)
    row0 = (first + c * C).to(tl.int64)
    at = (row0 * HV + hv) * V + i[None, :] * (HV * V) + ov[:, None]
    kt = tl.load(k + (row0 * H + h) * K + i[:, None] * (H * K) + d[None, :])
    qt = tl.load(q + (row0 * H + h) * K + i[:, None] * (H * K) + d[None, :])
    dS, drhsT = _back_step(dS, kt, qt, tl.load(do + at), tl.load(b_ws + w * C + i), E_ws, T_ws, M_ws, w, C)
    tl.store(drhs + at, drhsT.to(tl.bfloat16))
    return dS


@triton.jit
def back_chain_kernel(q, k, do, drhs, dh, sequences, blocks, b_ws, E_ws, T_ws, M_ws, H: tl.constexpr, HV: tl.constexpr,
                      K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr,
                      STAGES: tl.constexpr):  # fmt: skip
    """Per sequence, value head and slice of V. dh [blocks, HV, V, K] bf16: dL/dS at each block's end."""
    iv = tl.program_id(0)
    n = tl.program_id(1) // HV
    hv = tl.program_id(1) % HV
    h = hv // (HV // H)
    first = tl.load(sequences + 4 * n)
    length = tl.load(sequences + 4 * n + 1)
    chunk0 = tl.load(sequences + 4 * n + 3)
    block0 = tl.load(blocks + n)
    i = tl.arange(0, C)
    d = tl.arange(0, K)
    ov = iv * BV + tl.arange(0, BV)
    tile = ov[:, None] * K + d[None, :]
    dS = tl.zeros([BV, K], dtype=tl.float32)
    full = length // C
    held = length - full * C
    if held > 0:
        w = ((chunk0 + full) * HV + hv).to(tl.int64)
        row0 = (first + full * C).to(tl.int64)
        block = (block0 + full * C // BLOCK).to(tl.int64)
        tl.store(dh + (block * HV + hv) * V * K + tile, dS.to(tl.bfloat16))
        kt = rows(k + (row0 * H + h) * K, i, d, H * K, 0, held)
        qt = rows(q + (row0 * H + h) * K, i, d, H * K, 0, held)
        doT = rowsT(do + (row0 * HV + hv) * V, i, ov, HV * V, 0, held)
        dS, drhsT = _back_step(dS, kt, qt, doT, tl.load(b_ws + w * C + i), E_ws, T_ws, M_ws, w, C)
        at = (row0 * HV + hv) * V + i[None, :] * (HV * V) + ov[:, None]
        tl.store(drhs + at, drhsT.to(tl.bfloat16), mask=(i < held)[None, :])
    # The last block may be cut short; the others are whole: their dh is stored once each, without a mask.
    per: tl.constexpr = BLOCK // C
    whole = full // per
    if (held == 0) & (whole * per < full):
        tl.store(dh + ((block0 + whole).to(tl.int64) * HV + hv) * V * K + tile, dS.to(tl.bfloat16))
    for step in range(0, full - whole * per):
        dS = _back_chunk(dS, full - 1 - step, q, k, do, drhs, b_ws, E_ws, T_ws, M_ws, first, chunk0, h, hv, ov, H, HV, K, V, C)
    for step in tl.range(0, whole, num_stages=STAGES):
        group = whole - 1 - step
        tl.store(dh + ((block0 + group).to(tl.int64) * HV + hv) * V * K + tile, dS.to(tl.bfloat16))
        for j in tl.static_range(per):
            c = group * per + per - 1 - j
            dS = _back_chunk(dS, c, q, k, do, drhs, b_ws, E_ws, T_ws, M_ws, first, chunk0, h, hv, ov, H, HV, K, V, C)


@triton.jit
def back_inner_kernel(v, g, beta, do, u, drhs, dv, score_ws, solve_ws, db_v, block_table, scale, HV: tl.constexpr, V: tl.constexpr,
                      BLOCK: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Per block and value head, inside the block: dL/d(q k^T) and dL/dA before beta as bf16 [BLOCK, BLOCK], dv, V's part of dbeta."""
    block = tl.program_id(0).to(tl.int64)
    hv = tl.program_id(1)
    row0 = tl.load(block_table + 3 * block).to(tl.int64)
    held = tl.load(block_table + 3 * block + 1)
    i = tl.arange(0, BLOCK)
    real = i < held
    b = tl.load(beta + (row0 + i) * HV + hv, mask=real, other=0.0)
    dM = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    dA = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    db = tl.zeros([BLOCK], dtype=tl.float32)
    base = (row0 * HV + hv) * V
    for start in tl.range(0, V, BV, num_stages=STAGES):
        e = start + tl.arange(0, BV)
        do_t = rows(do + base, i, e, HV * V, 0, held)
        u_t = rows(u + base, i, e, HV * V, 0, held)
        r_t = rows(drhs + base, i, e, HV * V, 0, held)
        dM = dot_add(do_t, tl.trans(u_t), dM)
        dA = dot_add(r_t, tl.trans(u_t), dA)
        r32 = r_t.to(tl.float32)
        db += tl.sum(r32 * rows(v + base, i, e, HV * V, 0, held).to(tl.float32), 1)
        at = base + i[:, None] * (HV * V) + e[None, :]
        tl.store(dv + at, (r32 * b[:, None]).to(dv.dtype.element_ty), mask=real[:, None] & (e >= 0)[None, :])
    G = tl.cumsum(tl.load(g + (row0 + i) * HV + hv, mask=real, other=0.0), 0)
    keep = (i[:, None] >= i[None, :]) & real[:, None]
    low = (i[:, None] > i[None, :]) & real[:, None]
    decay = tl.exp(tl.where(keep, G[:, None] - G[None, :], 0.0))
    at = (block * HV + hv) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :]
    tl.store(score_ws + at, tl.where(keep, dM * decay * scale, 0.0).to(tl.bfloat16))
    tl.store(solve_ws + at, tl.where(low, 0.0 - dA * decay, 0.0).to(tl.bfloat16))
    tl.store(db_v + (row0 + i) * HV + hv, db, mask=real)


@triton.jit
def back_query_kernel(q, k, g, do, h_ws, score_ws, dq, dG_part, block_table, scale, T, group, steps, H: tl.constexpr, HV: tl.constexpr,
                      K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
                      STAGES: tl.constexpr):  # fmt: skip
    """Per block, key head and slice of K: dq, summed over the value heads, and q . dq as the slice's part of dG.

    ``group`` = HV / H and ``steps`` = V / BV are arguments lest the compiler unroll both loops: registers decide how many programs
    share a multiprocessor.
    """
    ik = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64)
    h = tl.program_id(2)
    row0 = tl.load(block_table + 3 * block).to(tl.int64)
    held = tl.load(block_table + 3 * block + 1)
    i = tl.arange(0, BLOCK)
    d = ik * BK + tl.arange(0, BK)
    real = i < held
    total = tl.zeros([BLOCK, BK], dtype=tl.float32)
    for j in tl.range(group, disable_licm=True):
        hv = h * (HV // H) + j
        acc = tl.zeros([BLOCK, BK], dtype=tl.float32)
        base = do + (row0 * HV + hv) * V
        state = h_ws + (block * HV + hv) * V * K
        for step in tl.range(steps, num_stages=STAGES):
            e = step * BV + tl.arange(0, BV)
            acc = dot_add(rows(base, i, e, HV * V, 0, held), tl.load(state + e[:, None] * K + d[None, :]), acc)
        kt = rows(k + (row0 * H + h) * K, i, d, H * K, 0, held)
        qt = rows(q + (row0 * H + h) * K, i, d, H * K, 0, held)
        G = tl.cumsum(tl.load(g + (row0 + i) * HV + hv, mask=real, other=0.0), 0)
        at = (block * HV + hv) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :]
        acc = dot_add(tl.load(score_ws + at), kt, acc * (tl.exp(G) * scale)[:, None])
        tl.store(dG_part + (ik * T + row0 + i) * HV + hv, tl.sum(qt.to(tl.float32) * acc, 1), mask=real)
        total += acc
    at = (row0 * H + h) * K + i[:, None] * (H * K) + d[None, :]
    tl.store(dq + at, total.to(dq.dtype.element_ty), mask=real[:, None] & (d >= 0)[None, :])


@triton.jit
def back_key_kernel(q, k, g, beta, u, drhs, h_ws, dh, score_ws, solve_ws, dk, dG_part, db_part, block_table, T, group, steps,
                    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr,
                    BV: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Per block, key head and slice of K: dk, summed over the value heads, and the slice's part of dbeta; completes that of dG."""
    ik = tl.program_id(0)
    block = tl.program_id(1).to(tl.int64)
    h = tl.program_id(2)
    row0 = tl.load(block_table + 3 * block).to(tl.int64)
    held = tl.load(block_table + 3 * block + 1)
    i = tl.arange(0, BLOCK)
    d = ik * BK + tl.arange(0, BK)
    real = i < held
    total = tl.zeros([BLOCK, BK], dtype=tl.float32)
    for j in tl.range(group, disable_licm=True):
        hv = h * (HV // H) + j
        row = tl.zeros([BLOCK, BK], dtype=tl.float32)  # dL/dk as a row of A and of rhs, before beta
        col = tl.zeros([BLOCK, BK], dtype=tl.float32)  # as a column of A and M, and in the next state
        hdh = 0.0
        base = (row0 * HV + hv) * V
        state = (block * HV + hv) * V * K
        for step in tl.range(steps, num_stages=STAGES):
            e = step * BV + tl.arange(0, BV)
            tile = e[:, None] * K + d[None, :]
            h_t = tl.load(h_ws + state + tile)
            dh_t = tl.load(dh + state + tile)
            row = dot_add(rows(drhs + base, i, e, HV * V, 0, held), h_t, row)
            col = dot_add(rows(u + base, i, e, HV * V, 0, held), dh_t, col)
            hdh += tl.sum(tl.sum(h_t.to(tl.float32) * dh_t.to(tl.float32), 1), 0)
        kt = rows(k + (row0 * H + h) * K, i, d, H * K, 0, held)
        qt = rows(q + (row0 * H + h) * K, i, d, H * K, 0, held)
        k32 = kt.to(tl.float32)
        G = tl.cumsum(tl.load(g + (row0 + i) * HV + hv, mask=real, other=0.0), 0)
        b = tl.load(beta + (row0 + i) * HV + hv, mask=real, other=0.0)
        last = tl.sum(tl.where(i == BLOCK - 1, G, 0.0), 0)
        at = (block * HV + hv) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :]
        col = col * tl.exp(last - G)[:, None]
        at_end = tl.exp(last) * hdh + tl.sum(tl.sum(k32 * col, 1), 0)
        col = dot_add(tl.trans(tl.load(score_ws + at)), qt, col)
        solve = tl.load(solve_ws + at)
        row = dot_add(solve, kt, row * (0.0 - tl.exp(G))[:, None])
        col = dot_add(tl.trans(solve), (k32 * b[:, None]).to(tl.bfloat16), col)
        part = (ik * T + row0 + i) * HV + hv
        tl.store(db_part + part, tl.sum(k32 * row, 1), mask=real)
        row = row * b[:, None]
        dG = tl.load(dG_part + part, mask=real, other=0.0) + tl.sum(k32 * (row - col), 1)
        tl.store(dG_part + part, tl.where(i == held - 1, dG + at_end, dG), mask=real)
        total += row + col
    at = (row0 * H + h) * K + i[:, None] * (H * K) + d[None, :]
    tl.store(dk + at, total.to(dk.dtype.element_ty), mask=real[:, None] & (d >= 0)[None, :])


@triton.jit
def back_gate_kernel(dG_part, db_part, db_v, dg, db, block_table, T, HV: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Sum the slices' parts in order; dg is the sum of dG over the later rows of the block (later blocks come in through dh)."""
    block = tl.program_id(0)
    hv = tl.program_id(1)
    row0 = tl.load(block_table + 3 * block).to(tl.int64)
    held = tl.load(block_table + 3 * block + 1)
    i = tl.arange(0, BLOCK)
    at = (row0 + i) * HV + hv
    dG = tl.zeros([BLOCK], dtype=tl.float32)
    b = tl.load(db_v + at, mask=i < held, other=0.0)
    for part in tl.static_range(PARTS):
        dG += tl.load(dG_part + part * T * HV + at, mask=i < held, other=0.0)
        b += tl.load(db_part + part * T * HV + at, mask=i < held, other=0.0)
    tl.store(dg + at, tl.cumsum(dG, 0, reverse=True), mask=i < held)
    tl.store(db + at, b, mask=i < held)
