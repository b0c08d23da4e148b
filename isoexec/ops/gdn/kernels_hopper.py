"""The chain of `cpr_wy` over whole chunks on sm_90: one warpgroup for each 64 rows of a state.

The products of kernels.py's `_full_chunk`, by the same instructions from the same operands: the same bits. What differs is what waits for
what. The next chunks' operands arrive in a ring while this one is computed; the query's products and the output's run beside those that
the next state waits for; an output leaves through shared memory while the next chunk is computed. Two barriers a chunk serve all of it. No
register of a product is written while one is under way, or the compiler would run them one after another.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from isoexec.ops.gdn import tiles

_high_plane, _low_plane, _join_planes = (gluon.jit(f.fn) for f in (tiles.high_plane, tiles.low_plane, tiles.join_planes))


@gluon.jit
def _fetch(q, k, v, T, M, q_ring, k_ring, v_ring, T_ring, M_ring, at, row, w, v_row, some, H: gl.constexpr, HV: gl.constexpr,
           K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Send for a chunk: its first row, and its place in the workspace; the pointers are of this program's heads."""
    KEYS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    slot = at % STAGES
    i = gl.arange(0, C, gl.SliceLayout(1, KEYS))[:, None]
    d = gl.arange(0, K, gl.SliceLayout(0, KEYS))[None, :]
    keys = i * (H * K) + d
    async_copy.async_copy_global_to_shared(k_ring.index(slot), k + row.to(gl.int64) * (H * K) + keys, mask=some & (keys >= 0))
    i = gl.arange(0, C, gl.SliceLayout(1, VALUES))[:, None]
    e = gl.arange(0, BV, gl.SliceLayout(0, VALUES))[None, :]
    values = i * v_row + e
    async_copy.async_copy_global_to_shared(v_ring.index(slot), v + row.to(gl.int64) * v_row + values, mask=some & (values >= 0))
    i = gl.arange(0, C, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, C, gl.SliceLayout(0, SQUARE))[None, :]
    square = i * C + j
    async_copy.async_copy_global_to_shared(T_ring.index(slot), T + w.to(gl.int64) * (C * C) + square, mask=some & (square >= 0))
    async_copy.async_copy_global_to_shared(q_ring.index(slot), q + row.to(gl.int64) * (H * K) + keys, mask=some & (keys >= 0))
    async_copy.async_copy_global_to_shared(M_ring.index(slot), M + w.to(gl.int64) * (C * C) + square, mask=some & (square >= 0))
    async_copy.commit_group()


@gluon.jit
def whole_chunks_kernel(q, k, v, T, M, o, high, low, slots, sequences, b_ws, E_ws, v_row, S_slot, H: gl.constexpr, HV: gl.constexpr,
                        K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Per sequence, value head and BV rows of V: all chunks whose C rows are of this call, from the pool's state and back into it."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [BV, C]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])  # [BV, K]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [4, 1], [1, 0])  # [C, BV]
    iv = gl.program_id(0)
    n = gl.program_id(1) // HV
    hv = gl.program_id(1) % HV
    h = hv // (HV // H)
    first = gl.load(sequences + 4 * n)
    length = gl.load(sequences + 4 * n + 1)
    start = gl.load(sequences + 4 * n + 2)
    chunk0 = gl.load(sequences + 4 * n + 3)
    slot_of = gl.load(slots + n).to(gl.int64)
    t0 = start % C
    whole = (t0 + length) // C
    c0 = ((t0 > 0) & (whole > 0)).to(gl.int32)  # a chunk that is resumed is not of this kernel
    count = whole - c0
    row0 = first - t0 + c0 * C
    w0 = (chunk0 + c0) * HV + hv
    q += h * K
    k += h * K
    v += hv * V + iv * BV
    o += hv * V + iv * BV

    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    VALUES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], gl.bfloat16)
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    OUTPUTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], o.dtype.element_ty)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], KEYS)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], KEYS)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], VALUES)
    T_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], SQUARE)
    M_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], SQUARE)
    outputs = gl.allocate_shared_memory(o.dtype.element_ty, [C, BV], OUTPUTS)
    for s in gl.static_range(STAGES - 1):
        _fetch(q, k, v, T, M, q_ring, k_ring, v_ring, T_ring, M_ring, s, row0 + s * C, w0 + s * HV, v_row, s < count, H, HV, K, V, C, BV,
               STAGES)  # fmt: skip

    i = gl.arange(0, C, gl.SliceLayout(0, ROW))
    rows = iv * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    d = gl.arange(0, K, gl.SliceLayout(0, STATE))
    tile = rows[:, None] * K + d[None, :]
    high += slot_of * S_slot + hv * V * K
    low += slot_of * S_slot + hv * V * K
    live = (count > 0) & (start - t0 + c0 * C >= C) & (tile >= 0)  # before that a slot's contents belong to nobody
    S = _join_planes(gl.load(high + tile, mask=live, other=0.0), gl.load(low + tile, mask=live, other=0))
    S_high = gl.convert_layout(_high_plane(S), LEFT)
    w = w0.to(gl.int64)
    some = (count > 0) & (i >= 0)
    b = gl.load(b_ws + w * C + i, mask=some, other=0.0)
    eG = gl.load(E_ws + w * 3 * C + i, mask=some, other=0.0)
    eGs = gl.load(E_ws + w * 3 * C + C + i, mask=some, other=0.0)
    left = gl.load(E_ws + w * 3 * C + 2 * C + i, mask=some, other=0.0)
    eC = gl.load(E_ws + w * 3 * C + C - 1, mask=count > 0, other=0.0)
    zeros = gl.zeros([BV, C], gl.float32, ROW)
    oT = zeros
    io = gl.arange(0, C, gl.SliceLayout(1, OUT))[:, None]
    out = io * (HV * V) + gl.arange(0, BV, gl.SliceLayout(0, OUT))[None, :]
    async_copy.wait_group(STAGES - 2)
    for c in range(count):
        slot = c % STAGES
        kt = k_ring.index(slot)
        ks = warpgroup_mma(S_high, kt.permute((1, 0)), zeros, is_async=True)
        qs = warpgroup_mma(S_high, q_ring.index(slot).permute((1, 0)), zeros, is_async=True)
        vT = v_ring.index(slot).permute((1, 0)).load(ROW).to(gl.float32)
        w = (w0 + gl.minimum(c + 1, count - 1) * HV).to(gl.int64)  # of the next chunk
        eC_next = gl.load(E_ws + w * 3 * C + C - 1)
        ks = warpgroup_mma_wait(1, deps=(ks,))
        rhsT = ((vT - ks * eG[None, :]) * b[None, :]).to(gl.bfloat16)
        uT = warpgroup_mma(gl.convert_layout(rhsT, LEFT), T_ring.index(slot).permute((1, 0)), zeros, is_async=True)
        b = gl.load(b_ws + w * C + i)
        eG = gl.load(E_ws + w * 3 * C + i)
        outputs.permute((1, 0)).store(oT.to(o.dtype.element_ty))
        uT, qs = warpgroup_mma_wait(0, deps=(uT, qs))
        oT = qs * eGs[None, :]
        low_u = gl.convert_layout(uT.to(gl.bfloat16), LEFT)
        moved = gl.convert_layout((uT * left[None, :]).to(gl.bfloat16), gl.DotOperandLayout(0, STATE, 2))
        S = warpgroup_mma(moved, kt, S * eC, is_async=True)
        eC = eC_next
        left = gl.load(E_ws + w * 3 * C + 2 * C + i)
        oT = warpgroup_mma(low_u, M_ring.index(slot).permute((1, 0)), oT, is_async=True)
        eGs = gl.load(E_ws + w * 3 * C + C + i)
        # Every warp is past the last chunk's products: its slot is free. The next chunk's operands are there.
        async_copy.wait_group(STAGES - 3)
        at = o + (row0 + (c - 1) * C).to(gl.int64) * (HV * V) + out
        gl.store(at, outputs.load(OUT), mask=(c > 0) & (out >= 0))
        ahead = c + STAGES - 1
        _fetch(q, k, v, T, M, q_ring, k_ring, v_ring, T_ring, M_ring, ahead, row0 + ahead * C, w0 + ahead * HV, v_row, ahead < count, H, HV,
               K, V, C, BV, STAGES)  # fmt: skip
        S, oT = warpgroup_mma_wait(0, deps=(S, oT))
        S_high = gl.convert_layout(_high_plane(S), LEFT)
    outputs.permute((1, 0)).store(oT.to(o.dtype.element_ty))
    at = o + (row0 + (count - 1) * C).to(gl.int64) * (HV * V) + out
    gl.store(at, outputs.load(OUT), mask=(count > 0) & (out >= 0))
    gl.store(high + tile, _high_plane(S), mask=(count > 0) & (tile >= 0))
    gl.store(low + tile, _low_plane(S), mask=(count > 0) & (tile >= 0))
