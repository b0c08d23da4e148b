"""Row-parallel products on sm_90: one warp fills a ring of tiles, two warpgroups multiply, each on its own half of the rows.

The same leaves, each accumulated in ascending K by the same kind of instruction, and the same tree as in triton.py: the same bits. A warpgroup
adds its leaves while the other one multiplies; the next tile's operands arrive, and this one's sums leave, by the copy engine. What bounds a
tile's size is the register file: the running leaf and two waiting sums take 192 of a thread's 255 registers, so that the sum of the first half of
eight leaves waits in shared memory. Few rows take tiles of 64 columns; where those are fewer than processors, several programs take a subtree of
a tile's leaves each, and a second launch the tree over the subtrees.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isoexec.ops._core import triton_math
from isoexec.ops._core.triton_math import COMPILE
from isoexec.ops.matmul import triton as portable

#: Committed, never tuned at run time: columns of a tile -> stages. Narrow tiles where that makes no more of them than there are processors.
ROWS, STEP = 128, 64
WIDE, NARROW = 128, 64
STAGES = {WIDE: 5, NARROW: 8}
#: Row tiles that share their weights in the L2 cache: for up to one tile a processor, for up to two, and for more.
GROUP = 4, 8, 2
REGISTERS = 168  # a thread's, before the warpgroups take the copying warp's
#: Up to so many rows the portable form is faster.
FEW_ROWS = 128
_HALF = gl.constexpr(64)  # rows of a warpgroup
_tree_push = gluon.jit(triton_math.tree_push.fn)


@gluon.jit
def _place(tile, M, N, BN: gl.constexpr, GROUP: gl.constexpr):
    """(first row, first column) of a tile; GROUP tiles of one column follow each other, to share its weights in the L2 cache."""
    columns = gl.cdiv(N, BN)
    group = tile // (GROUP * columns)
    height = gl.minimum(gl.cdiv(M, 2 * _HALF) - group * GROUP, GROUP)
    inside = tile - group * (GROUP * columns)
    return (group * GROUP + inside % height) * (2 * _HALF), (inside // height) * BN


@gluon.jit
def _fill(x, w, x_ring, w_ring, ready, free, M, N, steps, tiles, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """The copying warp: ``steps`` steps of K for every tile of this program, from those of the programs before it on the second grid axis."""
    # The launch may begin before the one ahead of it has ended. Nothing of this program touches memory before these copies.
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    first = gl.program_id(1) * steps
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _place(tile, M, N, BN, GROUP)
        both = row + _HALF < M  # a block without a row takes the engine longer than one with; nothing is stored of what is found in its place
        for s in range(steps):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            mbarrier.expect(full, (2 * _HALF + BN) * BK * 2, pred=both)
            mbarrier.expect(full, (_HALF + BN) * BK * 2, pred=not both)
            tma.async_copy_global_to_shared(x, [row, (first + s) * BK], full, x_ring.index(2 * slot))
            tma.async_copy_global_to_shared(x, [row + _HALF, (first + s) * BK], full, x_ring.index(2 * slot + 1), pred=both)
            tma.async_copy_global_to_shared(w, [column, (first + s) * BK], full, w_ring.index(slot))
            count += 1


@gluon.jit
def _leaf(x_ring, w_ring, ready, free, count, steps, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 sum over the next ``steps`` steps of K, ascending from +0.0. A step's tiles are given back once the next product is on its way."""
    acc = gl.zeros([_HALF, BN], gl.float32, LAYOUT)
    for s in range(steps):
        slot = (count + s) % STAGES
        mbarrier.wait(ready.index(slot), ((count + s) // STAGES) & 1)
        acc = warpgroup_mma(x_ring.index(2 * slot + HALF), w_ring.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(free.index((count + s + STAGES - 1) % STAGES), count=1, pred=s > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index((count + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _leaves(x_ring, w_ring, ready, free, count, steps, LEAVES: gl.constexpr, HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """Balanced tree over the next ``LEAVES`` <= 4 leaves."""
    total = gl.zeros([_HALF, BN], gl.float32, LAYOUT)
    one = total
    two = total
    for g in gl.static_range(LEAVES):
        leaf = _leaf(x_ring, w_ring, ready, free, count + g * steps, steps, HALF, BN, STAGES, LAYOUT)
        total, one, two, _ = _tree_push(leaf, one, two, two, g, LEAVES)
        if g == 1:
            # Added here: a compiler that puts the addition off until the sum is used keeps two terms in place of one.
            two = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [two], dtype=gl.float32, is_pure=False, pack=1)
    return total


@gluon.jit
def _multiply(y, bias, kept, x_ring, w_ring, ready, free, M, N, steps, tiles, BIAS: gl.constexpr, COPIED: gl.constexpr, LEAVES: gl.constexpr,
              HALF: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """A warpgroup: rows HALF * 64 and on of every tile; ``steps``: of one leaf."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    PARKED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    stored = kept.index(HALF * (kept.shape[0] // 2))
    waiting = stored._reinterpret(gl.float32, [_HALF, BN], PARKED)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        if LEAVES == 8:
            first = _leaves(x_ring, w_ring, ready, free, count, steps, 4, HALF, BN, STAGES, LAYOUT)
            if COPIED:
                tma.store_wait(0)
                gl.thread_barrier()
            waiting.store(first)
            total = _leaves(x_ring, w_ring, ready, free, count + 4 * steps, steps, 4, HALF, BN, STAGES, LAYOUT)
            total = waiting.load(LAYOUT) + total
        else:
            total = _leaves(x_ring, w_ring, ready, free, count, steps, LEAVES, HALF, BN, STAGES, LAYOUT)
        count += LEAVES * steps
        row, column = _place(tile, M, N, BN, GROUP)
        rn = column + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
        if BIAS:
            total = total + gl.load(bias + rn, mask=rn < N, other=0.0).to(gl.float32)[None, :]
        if COPIED:
            # The engine copies it out while the next tile is multiplied.
            if LEAVES < 8:
                tma.store_wait(0)
            gl.thread_barrier()  # the copy before it, or the sum that waited here, has been read
            stored.store(total.to(y.dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(y, [row + HALF * _HALF, column], stored)
        else:
            rm = row + HALF * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, LAYOUT))
            at = (gl.program_id(1).to(gl.int64) * M + rm.to(gl.int64))[:, None] * N + rn[None, :]
            gl.store(y + at, total.to(y.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])
    if COPIED:
        tma.store_wait(0)


@gluon.jit
def tree_product_kernel(x, w, bias, y, M, N, steps, tiles, BIAS: gl.constexpr, COPIED: gl.constexpr, LEAVES: gl.constexpr, BN: gl.constexpr,
                        BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """Tensor descriptors x [M, K] in blocks of 64 rows, w [N, K]; programs share out ``tiles`` tiles of 128 rows.

    A second grid axis keeps its programs' sums apart, of ``LEAVES`` leaves each: y [axis, M, N]. ``EARLY``: the next launch may start, and waits
    where it needs this one's results. ``COPIED``: y is a tensor descriptor in blocks of 64 rows.
    """
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    x_ring = gl.allocate_shared_memory(x.dtype, [2 * STAGES, _HALF, BK], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    # For each warpgroup: the sum of four leaves, then its part of the tile on its way out.
    if COPIED:
        kept = gl.allocate_shared_memory(y.dtype, [64 // y.dtype.primitive_bitwidth, _HALF, BN], y.layout)
    else:
        kept = gl.allocate_shared_memory(gl.float32, [2, _HALF if LEAVES == 8 else 1, BN], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
    gl.warp_specialize(
        [
            (_multiply, (y, bias, kept, x_ring, w_ring, ready, free, M, N, steps, tiles, BIAS, COPIED, LEAVES, 0, BN, STAGES, GROUP)),
            (_multiply, (y, bias, kept, x_ring, w_ring, ready, free, M, N, steps, tiles, BIAS, COPIED, LEAVES, 1, BN, STAGES, GROUP)),
            (_fill, (x, w, x_ring, w_ring, ready, free, M, N, LEAVES * steps, tiles, BN, BK, STAGES, GROUP)),
        ],
        [4, 1],
        [232, 24],
    )


@functools.lru_cache(maxsize=None)
def _processors(device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits(K: int, leaves: int) -> bool:
    """Whether every leaf is whole steps, and the sums fit the registers."""
    return leaves in (2, 4, 8) and K % (leaves * STEP) == 0


def _descriptor(x, rows: int, columns: int = STEP):
    """Blocks of ``x`` for the copy engine."""
    block, dtype = [rows, columns], gl.float32 if x.dtype == torch.float32 else gl.bfloat16
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, gl.NVMMASharedLayout.get_default_for(block, dtype))


class _Form(NamedTuple):
    """Columns of a tile, number of tiles, programs that share one out."""

    columns: int
    tiles: int
    parts: int


def form(M: int, N: int, leaves: int, processors: int) -> _Form:
    columns = NARROW if triton.cdiv(M, ROWS) * triton.cdiv(N, NARROW) <= processors else WIDE
    tiles, parts = triton.cdiv(M, ROWS) * triton.cdiv(N, columns), 1
    while parts < leaves and 2 * parts * tiles <= processors:
        parts *= 2
    return _Form(columns, tiles, parts)


def product(x, weight, dtype, bias, leaves: int):
    """``x`` [M, K] bf16 times ``weight`` [N, K] bf16 transposed, by ``leaves`` parts of K; bias added in fp32 -> [M, N] in ``dtype``."""
    M, N, processors = x.shape[0], weight.shape[0], _processors(x.device)
    chosen = form(M, N, leaves, processors)
    if chosen.parts == 1:
        return _launch(x, weight, bias, torch.empty(M, N, dtype=dtype, device=x.device), leaves, chosen, processors)
    apart = torch.empty(chosen.parts, M, N, dtype=torch.float32, device=x.device)
    return portable.tree(_launch(x, weight, None, apart, leaves // chosen.parts, chosen, processors), dtype, bias, early=True)


def _launch(x, weight, bias, y, leaves, chosen, processors):
    """``y`` [M, N], or [parts, M, N], each of ``leaves`` leaves."""
    (M, K), N, (columns, tiles, parts) = x.shape, weight.shape[0], chosen
    copied = parts == 1 and N * y.itemsize % 16 == 0
    if tiles:
        tree_product_kernel[min(tiles, processors), parts](
            _descriptor(portable.copyable(x), ROWS // 2), _descriptor(portable.copyable(weight), columns), y if bias is None else bias,
            _descriptor(y, ROWS // 2, columns) if copied else y, M, N, K // (parts * leaves) // STEP, tiles, bias is not None, copied, leaves,
            columns, STEP, STAGES[columns], GROUP[(tiles > processors) + (tiles > 2 * processors)], parts > 1, num_warps=4, maxnreg=REGISTERS, launch_pdl=True, **COMPILE,
        )  # fmt: skip
    return y
