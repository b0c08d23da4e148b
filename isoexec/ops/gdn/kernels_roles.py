"""The chain of `cpr_wy` over whole chunks on sm_90: warps of three kinds share 64 rows of a state.

The products of kernels.py's `_full_chunk`, by the same instructions from the same operands: the same bits. One warpgroup carries the state
from chunk to chunk and does little else, since everything waits for that chain. One product multiplies the state with a chunk's keys and
queries. Its part of the queries, and u, are left in shared memory for other warps, which finish and store the outputs; one more warp
sends for what both need. No register of a product is written while one is under way, or the compiler would run them one after another.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from isoexec.ops.gdn import tiles

_high_plane, _low_plane, _join_planes, _rhs_of, _moved = (
    gluon.jit(f.fn) for f in (tiles.high_plane, tiles.low_plane, tiles.join_planes, tiles.rhs_of, tiles.moved)
)


@gluon.jit
def _fetch(q, k, v, T, M, E, b, columns, v_ring, T_ring, M_ring, E_ring, b_ring, s_ring, ready, wanted, given, taken, row0, w0, count, key,
           value, HV: gl.constexpr, K: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Send for what every chunk's state (``ready``) and outputs (``wanted``) need; key, value: the heads' first columns.

    A slot of the state is free once the chunk after it was given on: its products are complete by then.
    """
    for c in range(count):
        slot = c % STAGES
        row = row0 + c * C
        w = w0 + c * HV
        after = c - STAGES + 1
        mbarrier.wait(given.index(after % STAGES), (after // STAGES) & 1, pred=after > 0)
        full = ready.index(slot)
        mbarrier.expect(full, (2 * C * K + C * BV + C * C) * 2 + 8 * C * 4)
        for half in gl.static_range(K // 64):
            at = 2 * (slot * (K // 64) + half)
            tma.async_copy_global_to_shared(k, [row, key + half * 64], full, columns.index(at))
            tma.async_copy_global_to_shared(q, [row, key + half * 64], full, columns.index(at + 1))
        tma.async_copy_global_to_shared(v, [row, value], full, v_ring.index(slot))
        tma.async_copy_global_to_shared(T, [w * C, 0], full, T_ring.index(slot))
        tma.async_copy_global_to_shared(E, [w * (3 * C)], full, E_ring.index(slot))
        tma.async_copy_global_to_shared(b, [w * C], full, b_ring.index(slot))
        mbarrier.wait(taken.index(slot), ((c // STAGES) & 1) ^ 1)
        full = wanted.index(slot)
        mbarrier.expect(full, C * C * 2 + 4 * C * 4)
        tma.async_copy_global_to_shared(M, [w * C, 0], full, M_ring.index(slot))
        tma.async_copy_global_to_shared(E, [w * (3 * C) + C], full, s_ring.index(slot))


@gluon.jit
def _advance(high, low, rows_ring, v_ring, T_ring, E_ring, b_ring, qs_ring, u_ring, ready, given, taken, count, live, K: gl.constexpr,
             C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr):  # fmt: skip
    """The state through all chunks; high, low: pointers to this program's rows of the slot."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])  # [BV, C]
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * C, 16])  # [BV, 2 C]
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])  # [BV, K]
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ROW, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, ROW)
    r = gl.arange(0, BV, gl.SliceLayout(1, STATE))[:, None]
    tile = r * K + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    S = _join_planes(gl.load(high + tile, mask=live & (tile >= 0), other=0.0), gl.load(low + tile, mask=live & (tile >= 0), other=0))
    S_high = gl.convert_layout(_high_plane(S), LEFT)
    zeros = gl.zeros([BV, C], gl.float32, ROW)
    nothing = gl.zeros([BV, 2 * C], gl.float32, BOTH)
    for c in range(count):
        slot = c % STAGES
        held = c % HELD
        mbarrier.wait(ready.index(slot), (c // STAGES) & 1)
        rows = rows_ring.index(slot)
        E = E_ring.index(slot)
        both = warpgroup_mma(S_high, rows.permute((1, 0)), nothing, is_async=True)
        vT = v_ring.index(slot).permute((1, 0)).load(ROW)
        eG = E.slice(0, C).load(COLUMNS)
        left = E.slice(2 * C, C).load(COLUMNS)
        b = b_ring.index(slot).slice(0, C).load(COLUMNS)
        eC = E.slice(C - 1, 1).load(gl.SliceLayout(0, STATE))
        decayed = S * eC[None, :]
        both = warpgroup_mma_wait(0, deps=(both,))
        ks, qs = gl.split(both.reshape((BV, 2, C)).permute((0, 2, 1)))
        ks = gl.convert_layout(ks, ROW, assert_trivial=True)
        qs = gl.convert_layout(qs, ROW, assert_trivial=True)
        rhsT = gl.convert_layout(_rhs_of(ks, vT, eG, b), LEFT)
        uT = warpgroup_mma(rhsT, T_ring.index(slot).permute((1, 0)), zeros, is_async=True)
        mbarrier.wait(taken.index((c - HELD) % STAGES), ((c - HELD) // STAGES) & 1, pred=c >= HELD)
        uT = warpgroup_mma_wait(0, deps=(uT,))
        moved = gl.convert_layout(_moved(uT, left), gl.DotOperandLayout(0, STATE, 2))
        low_u = uT.to(gl.bfloat16)
        S = warpgroup_mma(moved, rows.slice(0, C), decayed, is_async=True)
        qs_ring.index(held).store(qs)
        u_ring.index(held).store(low_u)
        mbarrier.arrive(given.index(slot), count=1)
        S = warpgroup_mma_wait(0, deps=(S,))
        S_high = gl.convert_layout(_high_plane(S), LEFT)
    gl.store(high + tile, _high_plane(S), mask=(count > 0) & (tile >= 0))
    gl.store(low + tile, _low_plane(S), mask=(count > 0) & (tile >= 0))


@gluon.jit
def _answer(o, M_ring, s_ring, qs_ring, u_ring, outputs, wanted, given, taken, count, HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr,
            BV: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """The outputs of all chunks; o: pointer to this program's columns of the first row."""
    ROW: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])  # [BV, C]
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [WARPS, 1], [1, 0])  # [C, BV]
    at = o + gl.arange(0, C, gl.SliceLayout(1, OUT))[:, None] * (HV * V) + gl.arange(0, BV, gl.SliceLayout(0, OUT))[None, :]
    for c in range(count):
        slot = c % STAGES
        held = c % HELD
        mbarrier.wait(wanted.index(slot), (c // STAGES) & 1)
        M = M_ring.index(slot).permute((1, 0)).load(gl.DotOperandLayout(1, ROW, 2))
        eGs = s_ring.index(slot).slice(0, C).load(gl.SliceLayout(0, ROW))
        mbarrier.wait(given.index(slot), (c // STAGES) & 1)
        qs = qs_ring.index(held).load(ROW)
        u = u_ring.index(held).load(gl.DotOperandLayout(0, ROW, 2))
        mbarrier.arrive(taken.index(slot), count=1)
        oT = mma_v2(u, M, qs * eGs[None, :])
        outputs.permute((1, 0)).store(oT.to(o.dtype.element_ty))
        gl.store(at, outputs.load(OUT))
        at += C * HV * V


@gluon.jit
def chain_roles_kernel(q, k, v, T, M, E, b, o, high, low, slots, sequences, S_slot, H: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
                       V: gl.constexpr, C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr,
                       WARPS: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """Per sequence, value head and BV rows of V: all chunks whose C rows are of this call, from the pool's state and back into it.

    Tensor descriptors q, k [T, H K], v [T, HV V] in blocks of C rows and one head's columns (of v: BV), T, M in squares, E and b in rows of
    4 C, of which those behind what is meant are not used.
    """
    iv = gl.program_id(0)
    n = gl.program_id(1) // HV
    hv = gl.program_id(1) % HV
    h = hv // (HV // H)
    first = gl.load(sequences + 4 * n)
    length = gl.load(sequences + 4 * n + 1)
    start = gl.load(sequences + 4 * n + 2)
    chunk0 = gl.load(sequences + 4 * n + 3)
    t0 = start % C
    whole = (t0 + length) // C
    c0 = ((t0 > 0) & (whole > 0)).to(gl.int32)  # a chunk that is resumed is not of this kernel
    count = whole - c0
    row0 = first - t0 + c0 * C
    w0 = (chunk0 + c0) * HV + hv
    state = gl.load(slots + n).to(gl.int64) * S_slot + (hv * V + iv * BV) * K
    live = (count > 0) & (start - t0 + c0 * C >= C)  # before that a slot's contents belong to nobody
    o += row0.to(gl.int64) * (HV * V) + hv * V + iv * BV
    # 64 columns of a chunk's keys, those of its queries, the next 64: so lie 2 C rows in the layout of one tile.
    columns = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2 * (K // 64), C, 64], k.layout)
    ROWS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * C, K], gl.bfloat16)
    rows_ring = columns._reinterpret(gl.bfloat16, [STAGES, 2 * C, K], ROWS)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], v.layout)
    T_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], T.layout)
    M_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], M.layout)
    E_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], E.layout)
    s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], E.layout)
    b_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * C], b.layout)
    PRODUCT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, C], gl.float32)
    ROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BV, C], gl.bfloat16)
    OUTPUTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, BV], o.dtype.element_ty)
    qs_ring = gl.allocate_shared_memory(gl.float32, [HELD, BV, C], PRODUCT)
    u_ring = gl.allocate_shared_memory(gl.bfloat16, [HELD, BV, C], ROW)
    outputs = gl.allocate_shared_memory(o.dtype.element_ty, [C, BV], OUTPUTS)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    wanted = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(wanted.index(s), count=1)
        mbarrier.init(given.index(s), count=1)
        mbarrier.init(taken.index(s), count=1)
    gl.warp_specialize(
        [
            (_advance, (high + state, low + state, rows_ring, v_ring, T_ring, E_ring, b_ring, qs_ring, u_ring, ready, given, taken,
                        count, live, K, C, BV, STAGES, HELD)),
            (_answer, (o, M_ring, s_ring, qs_ring, u_ring, outputs, wanted, given, taken, count, HV, V, C, BV, STAGES, HELD, WARPS)),
            (_fetch, (q, k, v, T, M, E, b, columns, v_ring, T_ring, M_ring, E_ring, b_ring, s_ring, ready, wanted, given, taken,
                      row0, w0, count, h * K, hv * V + iv * BV, HV, K, C, BV, STAGES)),
        ],
        [WARPS, 1],
        REGISTERS,
    )  # fmt: skip
