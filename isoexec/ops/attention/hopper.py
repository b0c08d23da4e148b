"""The pass by keys of attention's gradients on sm_90: one warp copies queries, two warpgroups own 64 keys each.

What triton_backward.py's pass by keys computes, for heads of 128 channels, dS to memory included. A block of queries serves both warpgroups; a
warpgroup's exponentials run beside the other's products, and the copies of the next blocks beside both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isoexec.ops._core.triton_math import COMPILE

CHANNELS = 128
#: Committed, never tuned at run time.
STAGES, REGISTERS = 2, 168
_ROWS = 32  # tokens of a program of `rows`
_HALF = gl.constexpr(64)  # keys of a warpgroup, and queries of a block
_TILE = gl.constexpr(128)  # keys of a program; queries and keys of a tile in memory
_LOG2E = gl.constexpr(1.4426950408889634)


@triton.jit
def rows_kernel(grad, out, lse, lse_out, delta_out, cu_seqlens, T, P, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    """Program (sequence, R tokens, head): log-sum-exp in powers of two, and row sums of grad * out, to [H, P]; see `rows`."""
    b = tl.program_id(0)
    head = tl.program_id(2)
    start = tl.load(cu_seqlens + b)
    new = tl.load(cu_seqlens + b + 1) - start
    i = tl.program_id(1) * R + tl.arange(0, R)
    here = i < new
    at = ((start + i).to(tl.int64) * H + head)[:, None] * K + tl.arange(0, K)[None, :]
    g = tl.load(grad + at, mask=here[:, None], other=0.0).to(tl.float32)
    o = tl.load(out + at, mask=here[:, None], other=0.0).to(tl.float32)
    to = head * P + (start // 4 + b) * 4 + i
    tl.store(delta_out + to, tl.sum(g * o, 1), mask=here)
    tl.store(lse_out + to, tl.load(lse + head * T + start + i, mask=here, other=0.0) * _LOG2E, mask=here)


@gluon.jit
def _turn(t, steps, n):
    """(which head of those that share a key head, first query) of turn ``t``."""
    r = t // steps
    return r, n + (t - r * steps) * _HALF


@gluon.jit
def _copy(q, grad, keys, values, lse, delta, own, ready, free, k_tiles, v_tiles, q_ring, g_ring, l_ring, d_ring, start, place, n, turns, steps, g, P,
          REPEAT: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: this program's keys and values, then a block of queries each turn."""
    if turns > 0:
        mbarrier.expect(own, 4 * _HALF * K * 2)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(keys, [start + n + half * _HALF, g * K], own, k_tiles.index(half))
            tma.async_copy_global_to_shared(values, [start + n + half * _HALF, g * K], own, v_tiles.index(half))
    for t in range(turns):
        r, first = _turn(t, steps, n)
        head = g * REPEAT + r
        slot = t % STAGES
        mbarrier.wait(free.index(slot), ((t // STAGES) & 1) ^ 1)
        full = ready.index(slot)
        mbarrier.expect(full, 2 * _HALF * K * 2 + 2 * _HALF * 4)
        tma.async_copy_global_to_shared(q, [start + first, head * K], full, q_ring.index(slot))
        tma.async_copy_global_to_shared(lse, [head * P + place + first], full, l_ring.index(slot))
        tma.async_copy_global_to_shared(grad, [start + first, head * K], full, g_ring.index(slot))
        tma.async_copy_global_to_shared(delta, [head * P + place + first], full, d_ring.index(slot))


@gluon.jit
def _select(tile, real, K: gl.constexpr):
    """Rows of ``tile`` [64, K] from ``real`` on become +0.0; whoever multiplies by them waits on a barrier of the caller's."""
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for part in gl.static_range(4):
        if real < 16 * part + 16:
            some = tile.slice(16 * part, 16)
            row = 16 * part + gl.arange(0, 16, gl.SliceLayout(1, BY_ROW))
            kept = gl.where((row < real)[:, None], some.load(BY_ROW), gl.zeros([16, K], tile.dtype, BY_ROW))
            gl.thread_barrier()
            some.store(kept)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _gradients(saved, grad_k, grad_v, own, ready, free, alone, k_tiles, v_tiles, q_ring, g_ring, l_ring, d_ring, ds_tiles, start, new, n, turns, steps,
               first_tile, tiles, g, scale, G: gl.constexpr, K: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A warpgroup: keys n + HALF * 64 and on."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    k = k_tiles.index(HALF)
    v = v_tiles.index(HALF)
    kept = ds_tiles.index(HALF)
    key = n + HALF * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, SCORES))
    query = gl.arange(0, _HALF, gl.SliceLayout(0, SCORES))
    none = gl.zeros([_HALF, _HALF], gl.float32, SCORES)
    dk = warpgroup_mma_init(gl.zeros([_HALF, K], gl.float32, SUMS))
    dv = gl.zeros([_HALF, K], gl.float32, SUMS)
    if turns > 0:
        mbarrier.wait(own, 0)
    for t in range(turns):
        r, first = _turn(t, steps, n)
        slot = t % STAGES
        mbarrier.wait(ready.index(slot), (t // STAGES) & 1)
        q = q_ring.index(slot)
        grad = g_ring.index(slot)
        if first + _HALF > new:
            # The block's other rows are the next sequence's, and may hold anything: a warpgroup takes them out of one tile each.
            _select(grad if HALF == 0 else q, new - first, K)
            mbarrier.arrive(alone, count=1)
            mbarrier.wait(alone, r & 1)
        s = warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, grad.permute((1, 0)), none, use_acc=False, is_async=True)
        s, dk_done = warpgroup_mma_wait(1, deps=(s, dk))
        mbarrier.arrive(free.index((t + STAGES - 1) % STAGES), count=1, pred=t > 0)
        i = first + query
        visible = (key[:, None] <= i[None, :]) & (i < new)[None, :]
        l = l_ring.index(slot).load(gl.SliceLayout(0, SCORES))
        p = gl.where(visible, gl.exp2(s * (scale * _LOG2E) - l[None, :]), 0.0)
        left = gl.convert_layout(p.to(gl.bfloat16), LEFT)
        (dp,) = (warpgroup_mma_wait(0, deps=(dp,)),)
        dv_next = warpgroup_mma(left, grad, dv, is_async=True)
        d = d_ring.index(slot).load(gl.SliceLayout(0, SCORES))
        ds = gl.where(visible, p * (dp - d[None, :]), 0.0).to(gl.bfloat16)
        tma.store_wait(0)
        gl.thread_barrier()  # the copy of the turn before has been read
        kept.store(ds)
        fence_async_shared()
        gl.thread_barrier()
        row = (first_tile + r * tiles + (first // _TILE) * (first // _TILE + 1) // 2 + n // _TILE) * _TILE + HALF * _HALF
        tma.async_copy_shared_to_global(saved, [row, first % _TILE], kept)
        dk = warpgroup_mma(kept, q, dk_done, is_async=True)
        dv, left = warpgroup_mma_wait(1, deps=(dv_next, left))
    total = warpgroup_mma_wait(0, deps=(dk,))
    channel = gl.arange(0, K, gl.SliceLayout(0, SUMS))
    token = n + HALF * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, SUMS))
    at = ((start + token).to(gl.int64) * G + g)[:, None] * K + channel[None, :]
    gl.store(grad_k + at, (total * scale).to(gl.bfloat16), mask=(token < new)[:, None])
    gl.store(grad_v + at, dv.to(gl.bfloat16), mask=(token < new)[:, None])
    tma.store_wait(0)


@gluon.jit
def paired_keys_kernel(q, grad, keys, values, lse, delta, saved, grad_k, grad_v, cu_seqlens, P, scale, tiles, first_group, groups, G: gl.constexpr,
                       REPEAT: gl.constexpr, K: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Program (sequence and key head, 128 keys); the keys that most queries see come first.

    Tensor descriptors: q, grad, keys, values in blocks of 64 tokens of one head, lse and delta [H * P] in blocks of 64, saved in blocks of 64
    keys and 64 queries.
    """
    b = gl.program_id(0) // groups
    local = gl.program_id(0) % groups
    g = first_group + local
    start = gl.load(cu_seqlens + b)
    new = gl.load(cu_seqlens + b + 1) - start
    n = gl.program_id(1) * _TILE
    steps = gl.maximum(gl.cdiv(new - n, _HALF), 0)
    turns = REPEAT * steps
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, N, ROW)
    lengths = gl.load(cu_seqlens + i + 1, mask=i < b, other=0) - gl.load(cu_seqlens + i, mask=i < b, other=0)
    blocks = (lengths + _TILE - 1) // _TILE
    first_tile = local * REPEAT * tiles + gl.sum(blocks * (blocks + 1) // 2, 0)

    k_tiles = gl.allocate_shared_memory(keys.dtype, [2, _HALF, K], keys.layout)
    v_tiles = gl.allocate_shared_memory(values.dtype, [2, _HALF, K], values.layout)
    q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, _HALF, K], q.layout)
    g_ring = gl.allocate_shared_memory(grad.dtype, [STAGES, _HALF, K], grad.layout)
    l_ring = gl.allocate_shared_memory(lse.dtype, [STAGES, _HALF], lse.layout)
    d_ring = gl.allocate_shared_memory(delta.dtype, [STAGES, _HALF], delta.layout)
    ds_tiles = gl.allocate_shared_memory(saved.dtype, [2, _HALF, _HALF], saved.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    own = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    alone = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(own, count=1)
    mbarrier.init(alone, count=2)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
    gl.warp_specialize(
        [
            (_gradients, (saved, grad_k, grad_v, own, ready, free, alone, k_tiles, v_tiles, q_ring, g_ring, l_ring, d_ring, ds_tiles, start, new, n, turns,
                          steps, first_tile, tiles, g, scale, G, K, 0, STAGES)),
            (_gradients, (saved, grad_k, grad_v, own, ready, free, alone, k_tiles, v_tiles, q_ring, g_ring, l_ring, d_ring, ds_tiles, start, new, n, turns,
                          steps, first_tile, tiles, g, scale, G, K, 1, STAGES)),
            (_copy, (q, grad, keys, values, lse, delta, own, ready, free, k_tiles, v_tiles, q_ring, g_ring, l_ring, d_ring, start,
                     (start // 4 + b) * 4, n, turns, steps, g, P, REPEAT, K, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def serves(x) -> bool:
    """Whether heads of ``x`` [T, H, K] take this pass."""
    return x.is_cuda and x.shape[2] == CHANNELS and torch.cuda.get_device_capability(x.device) == (9, 0)


def _descriptor(x, block, dtype=gl.bfloat16):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, dtype))


def rows(grad, out, lse, cu_seqlens, longest):
    """(log-sum-exp in powers of two, row sums of ``grad * out``), both [H, P] fp32, for `by_keys`.

    The copy engine reads from multiples of 16 bytes on, so sequence b begins at 4 (cu_seqlens[b] // 4 + b); what lies between is not set.
    """
    (T, H, K), sequences = out.shape, cu_seqlens.shape[0] - 1
    found = [torch.empty(H, 4 * (triton.cdiv(T, 4) + sequences), dtype=torch.float32, device=out.device) for _ in range(2)]
    rows_kernel[sequences, triton.cdiv(longest, _ROWS), H](grad, out, lse, *found, cu_seqlens, T, found[0].shape[1], H, K, _ROWS, num_warps=4, **COMPILE)
    return found


def by_keys(q, k, v, grad, of_rows, saved, grad_k, grad_v, cu_seqlens, scale, longest, tiles, first_group, groups, power):
    """dK and dV of ``groups`` key heads from ``first_group`` on, and their dS to ``saved`` [tiles * 128, 128].

    Args:
        q, grad: [T, H, 128] bf16; k, v: [T, G, 128] bf16, as triton_backward.py packs them; of_rows: from `rows`.
        tiles: bound of one head's tiles in ``saved``; power: a power of two from the number of sequences on.
    """
    (T, H, K), G = q.shape, k.shape[1]
    blocks = [_descriptor(x.as_strided((T, x.shape[1] * K), (x.stride(0), 1)), [_HALF.value, K]) for x in (q, grad, k, v)]
    vectors = [_descriptor(x.view(-1), [_HALF.value], gl.float32) for x in of_rows]
    paired_keys_kernel[(cu_seqlens.shape[0] - 1) * groups, triton.cdiv(longest, _TILE.value)](
        *blocks, *vectors, _descriptor(saved, [_HALF.value, _HALF.value]), grad_k, grad_v, cu_seqlens, of_rows[0].shape[1], scale, tiles, first_group,
        groups, G, H // G, K, max(power, 128), STAGES, num_warps=4, maxnreg=REGISTERS, **COMPILE,
    )  # fmt: skip
