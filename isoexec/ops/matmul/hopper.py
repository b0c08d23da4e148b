"""Row-parallel products on sm_90: one warp fills a ring of tiles, two warpgroups multiply, each on its own half of a tile.

The same leaves, each accumulated in ascending K by the same kind of instruction, and the same tree as in triton.py: the same bits. A warpgroup
adds its leaves while the other one multiplies; the next tile's operands arrive, and this one's sums leave, by the copy engine. What bounds a
tile's size is the register file: the running leaf and two waiting sums take 192 of a thread's 255 registers, so that the sum of the first half of
eight leaves waits in shared memory. What bounds its speed are the bytes of shared memory that a step reads and writes, so of the tiles at hand
those are taken whose bytes, times the tiles of the busiest processor, are fewest; few rows take tiles of 64 columns, and where those are fewer than
processors, several programs take a subtree of a tile's leaves each, and a second launch the tree over the subtrees.
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


class _Tile(NamedTuple):
    """Rows, columns of either warpgroup, stages, and whether each takes half of the leaves.

    Else each has half of 128 rows, and all columns, or all of 64 rows, and columns of its own.
    """

    rows: int
    columns: tuple[int, int]
    stages: int
    apart: bool = False

    @property
    def width(self) -> int:
        return self.columns[0] if self.rows == 128 or self.apart else sum(self.columns)

    def count(self, M: int, N: int) -> int:
        return triton.cdiv(M, self.rows) * triton.cdiv(N, self.width)

    def traffic(self) -> int:
        """Rows of operands that a step reads (each warpgroup 64 of x and its columns of weights) and writes."""
        return sum(64 + columns for columns in self.columns) // (1 + self.apart) + self.rows + self.width


#: Committed, never tuned at run time.
STEP = 64
NARROW, APART = _Tile(128, (64, 64), 8), _Tile(64, (64, 64), 6, apart=True)
SHARED_OUT = _Tile(128, (128, 128), 5), _Tile(64, (128, 64), 5), _Tile(64, (64, 32), 8), NARROW
TILES = *SHARED_OUT, APART
#: Tiles of 128 rows that share their weights in the L2 cache: for up to one a processor, for up to two, and for more.
GROUP = 4, 8, 2
REGISTERS = 168  # a thread's, before the warpgroups take the copying warp's
#: Up to so many rows the portable form is faster.
FEW_ROWS = 128
_HALF = gl.constexpr(64)  # rows of a warpgroup
_tree_push = gluon.jit(triton_math.tree_push.fn)


@gluon.jit
def _place(tile, M, N, ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr):
    """(first row, first column) of a tile; GROUP tiles of one column follow each other, to share its weights in the L2 cache."""
    columns = gl.cdiv(N, COLUMNS)
    group = tile // (GROUP * columns)
    height = gl.minimum(gl.cdiv(M, ROWS) - group * GROUP, GROUP)
    inside = tile - group * (GROUP * columns)
    return (group * GROUP + inside % height) * ROWS, (inside // height) * COLUMNS


@gluon.jit
def _fill(x, w, w_beside, x_ring, w_ring, w_ring_beside, ready, free, M, N, steps, tiles, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
          APART: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """The copying warp: ``steps`` steps of K for every tile of this program, from those of the programs before it on the second grid axis.

    ``APART``: for either warpgroup, one behind the other's.
    """
    # The launch may begin before the one ahead of it has ended. Nothing of this program touches memory before these copies.
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    BK: gl.constexpr = w_ring.shape[2]
    FIRST: gl.constexpr = w_ring.shape[1]
    BELOW: gl.constexpr = ROWS == 2 * _HALF
    BESIDE: gl.constexpr = COLUMNS > FIRST
    # What the second warpgroup has of its own: rows of x, or of weights, or both.
    SECOND: gl.constexpr = (0 if BESIDE else _HALF) + (0 if BELOW else w_ring_beside.shape[1])
    first = gl.program_id(1) * steps
    behind = steps * BK if APART else 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, column = _place(tile, M, N, ROWS, COLUMNS, GROUP)
        # A block without a row, or a column, takes the engine longer than one with; nothing is stored of what is found in its place.
        both = row + _HALF < M if BELOW else (column + FIRST < N if BESIDE else row >= 0)
        for s in range(steps):
            slot = count % STAGES
            k = (first + s) * BK
            mbarrier.wait(free.index(slot), ((count // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            mbarrier.expect(full, (_HALF + FIRST + SECOND) * BK * 2, pred=both)
            mbarrier.expect(full, (_HALF + FIRST) * BK * 2, pred=not both)
            tma.async_copy_global_to_shared(x, [row, k], full, x_ring.index(slot if BESIDE else 2 * slot))
            if not BESIDE:
                tma.async_copy_global_to_shared(x, [row + ROWS - _HALF, k + behind], full, x_ring.index(2 * slot + 1), pred=both)
            tma.async_copy_global_to_shared(w, [column, k], full, w_ring.index(slot))
            if not BELOW:
                tma.async_copy_global_to_shared(w_beside, [column + COLUMNS - w_ring_beside.shape[1], k + behind], full,
                                                w_ring_beside.index(slot), pred=both)  # fmt: skip
            count += 1


@gluon.jit
def _leaf(x_ring, w_ring, ready, free, count, steps, HALF: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 sum over the next ``steps`` steps of K, ascending from +0.0. A step's tiles are given back once the next product is on its way."""
    BN: gl.constexpr = w_ring.shape[1]
    BLOCKS: gl.constexpr = x_ring.shape[0] // STAGES
    acc = gl.zeros([_HALF, BN], gl.float32, LAYOUT)
    for s in range(steps):
        slot = (count + s) % STAGES
        mbarrier.wait(ready.index(slot), ((count + s) // STAGES) & 1)
        acc = warpgroup_mma(x_ring.index(slot * BLOCKS + HALF), w_ring.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(free.index((count + s + STAGES - 1) % STAGES), count=1, pred=s > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index((count + steps - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _leaves(x_ring, w_ring, ready, free, count, steps, LEAVES: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr):
    """Balanced tree over the next ``LEAVES`` <= 4 leaves."""
    BN: gl.constexpr = w_ring.shape[1]
    total = gl.zeros([_HALF, BN], gl.float32, LAYOUT)
    one = total
    two = total
    for g in gl.static_range(LEAVES):
        leaf = _leaf(x_ring, w_ring, ready, free, count + g * steps, steps, HALF, STAGES, LAYOUT)
        total, one, two, _ = _tree_push(leaf, one, two, two, g, LEAVES)
        if g == 1:
            # Added here: a compiler that puts the addition off until the sum is used keeps two terms in place of one.
            two = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [two], dtype=gl.float32, is_pure=False, pack=1)
    return total


@gluon.jit
def _multiply(y, bias, kept, handed, met, x_ring, w_ring, ready, free, M, N, steps, tiles, BIAS: gl.constexpr, COPIED: gl.constexpr,
              LEAVES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, APART: gl.constexpr, HALF: gl.constexpr, OFFSET: gl.constexpr,
              STAGES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """A warpgroup: 64 rows from HALF * 64 and the columns from OFFSET of every tile; ``steps``: of one leaf.

    ``APART``: all rows and columns of the one tile that its program has, HALF of its leaves; the second half's sum is ``handed`` to the first.
    """
    BN: gl.constexpr = w_ring.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    PARKED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    stored = kept.index(0)
    waiting = stored._reinterpret(gl.float32, [_HALF, BN], PARKED)
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        if LEAVES == 8:
            first = _leaves(x_ring, w_ring, ready, free, count, steps, 4, HALF, STAGES, LAYOUT)
            if COPIED:
                tma.store_wait(0)
                gl.thread_barrier()
            waiting.store(first)
            total = _leaves(x_ring, w_ring, ready, free, count + 4 * steps, steps, 4, HALF, STAGES, LAYOUT)
            total = waiting.load(LAYOUT) + total
        else:
            total = _leaves(x_ring, w_ring, ready, free, count, steps, LEAVES, HALF, STAGES, LAYOUT)
        count += LEAVES * steps
        row, column = _place(tile, M, N, ROWS, COLUMNS, GROUP)
        if APART and HALF == 1:
            handed._reinterpret(gl.float32, [_HALF, BN], PARKED).store(total)
            mbarrier.arrive(met.index(0), count=1)
        else:
            if APART:
                mbarrier.wait(met.index(0), 0)
                total = total + handed._reinterpret(gl.float32, [_HALF, BN], PARKED).load(LAYOUT)
            _put(y, bias, stored, total, row + HALF * _HALF, column + OFFSET, M, N, BIAS, COPIED, LEAVES, LAYOUT)
    if COPIED:
        tma.store_wait(0)


@gluon.jit
def _put(y, bias, stored, total, row, column, M, N, BIAS: gl.constexpr, COPIED: gl.constexpr, LEAVES: gl.constexpr, LAYOUT: gl.constexpr):
    """Writes a warpgroup's part of a tile, with bias; the copy engine does it while the next tile is multiplied."""
    BN: gl.constexpr = total.shape[1]
    rn = column + gl.arange(0, BN, gl.SliceLayout(0, LAYOUT))
    if BIAS:
        total = total + gl.load(bias + rn, mask=rn < N, other=0.0).to(gl.float32)[None, :]
    if COPIED:
        if LEAVES < 8:
            tma.store_wait(0)
        gl.thread_barrier()  # the copy before it, or the sum that waited here, has been read
        stored.store(total.to(y.dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(y, [row, column], stored)
    else:
        rm = row + gl.arange(0, _HALF, gl.SliceLayout(1, LAYOUT))
        at = (gl.program_id(1).to(gl.int64) * M + rm.to(gl.int64))[:, None] * N + rn[None, :]
        gl.store(y + at, total.to(y.dtype.element_ty), mask=(rm < M)[:, None] & (rn < N)[None, :])


@gluon.jit
def _kept(y, COPIED: gl.constexpr, WAITS: gl.constexpr, BN: gl.constexpr):
    """A warpgroup's shared memory: a sum that waits, then its part of the tile on its way out."""
    if COPIED:
        return gl.allocate_shared_memory(y.dtype, [32 // y.dtype.primitive_bitwidth, _HALF, BN], y.layout)
    else:
        return gl.allocate_shared_memory(gl.float32, [1, _HALF if WAITS else 1, BN], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.jit
def tree_product_kernel(x, w, w_beside, bias, y, y_beside, M, N, steps, tiles, BIAS: gl.constexpr, COPIED: gl.constexpr, LEAVES: gl.constexpr,
                        ROWS: gl.constexpr, FIRST: gl.constexpr, SECOND: gl.constexpr, APART: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
                        GROUP: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    """Tensor descriptors x [M, K] in blocks of 64 rows, w [N, K] of FIRST and of SECOND; programs share out ``tiles`` tiles.

    The warpgroups' halves of a tile lie below each other (128 ROWS, FIRST = SECOND columns) or beside (64 ROWS, FIRST + SECOND columns);
    ``APART``, they are halves of its leaves (64 ROWS, FIRST = SECOND columns), and a program has one tile.
    A second grid axis keeps its programs' sums apart, of ``LEAVES`` leaves each: y [axis, M, N]. ``EARLY``: the next launch may start, and waits
    where it needs this one's results. ``COPIED``: y is a tensor descriptor in blocks of 64 rows, of FIRST and of SECOND columns.
    """
    if EARLY:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    BELOW: gl.constexpr = ROWS == 2 * _HALF
    BESIDE: gl.constexpr = ROWS == _HALF and not APART
    COLUMNS: gl.constexpr = FIRST + SECOND if BESIDE else FIRST
    EACH: gl.constexpr = LEAVES // 2 if APART else LEAVES
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES if BESIDE else 2 * STAGES, _HALF, BK], x.layout)
    w_ring = gl.allocate_shared_memory(w.dtype, [STAGES, FIRST, BK], w.layout)
    w_ring_beside = w_ring if BELOW else gl.allocate_shared_memory(w_beside.dtype, [STAGES, SECOND, BK], w_beside.layout)
    kept = _kept(y, COPIED, LEAVES == 8 and not APART, FIRST)
    kept_other = _kept(y_beside, COPIED, LEAVES == 8 or APART, SECOND)
    handed = kept_other.index(0)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(met.index(0), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=2)
    gl.warp_specialize(
        [
            (_multiply, (y, bias, kept, handed, met, x_ring, w_ring, ready, free, M, N, steps, tiles, BIAS, COPIED, EACH, ROWS, COLUMNS, APART, 0, 0,
                         STAGES, GROUP)),
            (_multiply, (y_beside, bias, kept_other, handed, met, x_ring, w_ring_beside, ready, free, M, N, steps, tiles, BIAS, COPIED, EACH, ROWS,
                         COLUMNS, APART, 0 if BESIDE else 1, FIRST if BESIDE else 0, STAGES, GROUP)),
            (_fill, (x, w, w_beside, x_ring, w_ring, w_ring_beside, ready, free, M, N, EACH * steps, tiles, ROWS, COLUMNS, APART, STAGES, GROUP)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


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
    """Tile, number of tiles, programs that share one out."""

    tile: _Tile
    tiles: int
    parts: int


def form(M: int, N: int, leaves: int, processors: int) -> _Form:
    """The tile whose shared memory's bytes, times the tiles of the busiest processor, are fewest, or programs that share out a tile's leaves."""
    if 2 * APART.count(M, N) > processors >= APART.count(M, N):
        return _Form(APART, APART.count(M, N), 1)
    tiles, parts = NARROW.count(M, N), 1
    while parts < leaves and 2 * parts * tiles <= processors:
        parts *= 2
    if parts > 1:
        return _Form(NARROW, tiles, parts)
    tile = min(SHARED_OUT, key=lambda tile: triton.cdiv(tile.count(M, N), processors) * tile.traffic())
    return _Form(tile, tile.count(M, N), 1)


def _group(M: int, tile: _Tile, tiles: int, processors: int) -> int:
    """Row tiles that are taken one after another."""
    if tile.rows == 128:
        return GROUP[(tiles > processors) + (tiles > 2 * processors)]
    return 5 if triton.cdiv(M, tile.rows) % 4 == 1 else 4  # not one row tile alone, which would read all weights once more


def product(x, weight, dtype, bias, leaves: int, tile: _Tile | None = None):
    """``x`` [M, K] bf16 times ``weight`` [N, K] bf16 transposed, by ``leaves`` parts of K; bias added in fp32 -> [M, N] in ``dtype``.

    Args:
        tile: in place of the one that ``form`` takes.
    """
    M, N, processors = x.shape[0], weight.shape[0], _processors(x.device)
    chosen = _Form(tile, tile.count(M, N), 1) if tile else form(M, N, leaves, processors)
    if chosen.parts == 1:
        return _launch(x, weight, bias, torch.empty(M, N, dtype=dtype, device=x.device), leaves, chosen, processors)
    apart = torch.empty(chosen.parts, M, N, dtype=torch.float32, device=x.device)
    return portable.tree(_launch(x, weight, None, apart, leaves // chosen.parts, chosen, processors), dtype, bias, early=True)


def _launch(x, weight, bias, y, leaves, chosen, processors):
    """``y`` [M, N], or [parts, M, N], each of ``leaves`` leaves."""
    (M, K), N, (tile, tiles, parts) = x.shape, weight.shape[0], chosen
    copied = parts == 1 and N * y.itemsize % 16 == 0
    if tiles:
        weight = portable.copyable(weight)
        tree_product_kernel[tiles if tile.apart else min(tiles, processors), parts](
            _descriptor(portable.copyable(x), 64), *(_descriptor(weight, columns) for columns in tile.columns), y if bias is None else bias,
            *(_descriptor(y, 64, columns) if copied else y for columns in tile.columns), M, N, K // (parts * leaves) // STEP, tiles, bias is not None,
            copied, leaves, tile.rows, *tile.columns, tile.apart, STEP, tile.stages, _group(M, tile, tiles, processors), parts > 1,
            num_warps=4, maxnreg=REGISTERS, launch_pdl=True, **COMPILE,
        )  # fmt: skip
    return y
