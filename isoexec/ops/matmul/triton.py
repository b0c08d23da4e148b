"""Portable matrix products in Triton: each output tile is accumulated in ascending K by one program, the leaves' tree in registers.

Tiles are at least 64 rows high, so that every M runs the same matrix instruction; a row's bits depend on the row and the weight alone.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from isoexec.contract import ContractError
from isoexec.ops._core.triton_math import COMPILE, dot_add, tree_push

#: (rows, columns, K step, warps, pipeline stages). Committed, never tuned at run time; moves no bit but by the K step.
SMALL, MEDIUM, LARGE = (64, 64, 64, 4, 4), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3)
#: The tree in registers keeps log2(leaves) accumulators beside the running one; few rows take smaller tiles.
TREE_ROWS = 768
TREE_FEW = {2: (64, 128, 64, 4, 4), 4: (64, 128, 64, 4, 4), 8: (64, 64, 64, 4, 4)}
TREE = {2: (128, 128, 64, 8, 4), 4: (128, 128, 64, 8, 4), 8: (128, 128, 64, 8, 4)}
MAX_LEAVES = 8
#: Up to so many rows there are too few tiles to fill a GPU: each leaf is a program of its own, and a second launch takes the tree.
APART_ROWS = 256
#: Tiles of such programs for up to 64 rows and for up to 128, by leaves: of few programs each keeps more of its weights on the way.
APART = {
    2: ((64, 32, 128, 4, 6), (64, 64, 64, 4, 8)),
    4: ((64, 64, 64, 4, 8), (64, 64, 64, 4, 6)),
    8: ((64, 64, 64, 4, 6), (128, 64, 64, 4, 4)),
}


@triton.jit
def _leaf(x, w, row, column, first, size, M, row_step, RAGGED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """fp32 sum over K in [first, first + size), ascending from +0.0. Rows and columns that do not exist are read as zeros.

    ``RAGGED``: x is a pointer, to rows that fill no tile: the copy engine takes longer for a row that does not exist than for one that does.
    """
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, size, BK):
        if RAGGED:
            rows = row + tl.arange(0, BM)
            at = rows[:, None] * (row_step // 8) * 8 + (first + k + tl.arange(0, BK))[None, :]  # rows of whole 16 bytes, as `copyable` sees to
            left = tl.load(x + at, mask=(rows < M)[:, None], other=0.0)
        else:
            left = x.load([row, first + k])
        acc = dot_add(left, tl.trans(w.load([column, first + k])), acc)
    return acc


@triton.jit
def _leaves(x, w, row, column, first, size, LEAVES: tl.constexpr, FLAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Balanced tree (neighbours first) over ``LEAVES`` leaves. ``FLAT``: in one loop, so that the loads of a leaf run while the one before it ends."""
    total = tl.zeros([BM, BN], dtype=tl.float32)
    one = total
    two = total
    four = total
    steps = size // BK
    for s in range(LEAVES * steps if FLAT else LEAVES):
        if FLAT:
            total = dot_add(x.load([row, first + s * BK]), tl.trans(w.load([column, first + s * BK])), total)
        else:
            total = _leaf(x, w, row, column, first + s * size, size, 0, 0, False, BM, BN, BK)
        if not FLAT or s % steps == steps - 1:
            g = s // steps if FLAT else s
            total, one, two, four = tree_push(total, one, two, four, g, LEAVES)
            if FLAT and g < LEAVES - 1:
                total = tl.zeros([BM, BN], dtype=tl.float32)
    return total


@triton.jit
def product_kernel(x, w, bias, y, parked, M, N, size, row_step, BIAS: tl.constexpr, LEAVES: tl.constexpr, PARK: tl.constexpr, FLAT: tl.constexpr,
                   RAGGED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Tensor descriptors x [M, K] (``RAGGED``: a pointer, rows ``row_step`` apart), w [N, K]. ``LEAVES`` parts of K, each ``size`` long, added by the tree.

    ``PARK``: the sum of the first half of the leaves waits in ``parked`` [programs, BM, BN] fp32 (in L2), not in registers. A second grid axis
    keeps its programs' sums apart: y [axis, M, N]. ``EARLY``: the next launch may start, and waits where it needs this one's results.
    """
    if EARLY:
        gdc_launch_dependents()
    columns = tl.cdiv(N, BN)
    group = tl.program_id(0) // (GROUP * columns)
    height = tl.minimum(tl.cdiv(M, BM) - group * GROUP, GROUP)
    inside = tl.program_id(0) - group * (GROUP * columns)
    row = (group * GROUP + inside % height) * BM
    column = (inside // height) * BN
    first = tl.program_id(1) * LEAVES * size
    if LEAVES == 1:
        total = _leaf(x, w, row, column, first, size, M, row_step, RAGGED, BM, BN, BK)
    elif PARK:
        # Constant offsets and no mask: addresses take no registers from the sums.
        slot = parked + tl.program_id(0).to(tl.int64) * (BM * BN) + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(slot, _leaves(x, w, row, column, first, size, LEAVES // 2, FLAT, BM, BN, BK))
        total = _leaves(x, w, row, column, first + LEAVES // 2 * size, size, LEAVES // 2, FLAT, BM, BN, BK)
        tl.debug_barrier()
        total = tl.load(slot) + total
    else:
        total = _leaves(x, w, row, column, first, size, LEAVES, FLAT, BM, BN, BK)
    rm = (row + tl.arange(0, BM)).to(tl.int64)
    rn = (column + tl.arange(0, BN)).to(tl.int64)
    at = rm[:, None] * N + rn[None, :]
    here = (rm < M)[:, None] & (rn < N)[None, :]
    if BIAS:
        total = total + tl.load(bias + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + tl.program_id(1).to(tl.int64) * M * N + at, total.to(y.dtype.element_ty), mask=here)


@triton.jit
def tree_kernel(partials, bias, y, size, N, BIAS: tl.constexpr, LEAVES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Partials [LEAVES, M, N] -> their balanced tree, bias, one rounding. ``EARLY``: started before the launch that gives the partials ends."""
    if EARLY:
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    one = total
    two = total
    four = total
    for g in tl.static_range(LEAVES):
        total, one, two, four = tree_push(tl.load(partials + g * size + at, mask=here, other=0.0), one, two, four, g, LEAVES)
    if BIAS:
        total = total + tl.load(bias + at % N, mask=here, other=0.0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), mask=here)


def product(x, weight, dtype, bias=None, leaves=1, tiles=None):
    """``x`` [M, K] bf16 times ``weight`` [N, K] bf16 transposed, by ``leaves`` parts of K; bias added in fp32 -> [M, N] in ``dtype``."""
    if leaves > MAX_LEAVES:
        raise ContractError(f"matmul: {leaves} leaves on one rank; the Triton form adds up to {MAX_LEAVES}")
    if leaves > 1 and tiles is None and x.shape[0] <= APART_ROWS:
        return tree(partials(x, weight, leaves), dtype, bias, early=_early(x.device))
    M, N = x.shape[0], weight.shape[0]
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    _launch(x, weight, bias, y, tiles or _tiles(M, leaves), leaves, False)
    return y


def partials(x, weight, leaves, tiles=None):
    """The ``leaves`` parts, not yet added: [leaves, M, N] fp32."""
    y = torch.empty(leaves, x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, tiles or _apart_tiles(x.shape[0], leaves), leaves, True)
    return y


def _apart_tiles(M: int, leaves: int):
    return APART[leaves][M > 64] if leaves in APART and M <= 128 else _tiles(M)


def _tiles(M: int, leaves: int = 1):
    if leaves > 1:
        return (TREE_FEW if M <= TREE_ROWS else TREE)[leaves]
    return SMALL if M <= 64 else MEDIUM if M <= 512 else LARGE


def _launch(x, weight, bias, y, tiles, leaves, apart):
    (M, K), N, (BM, BN, BK, warps, stages) = x.shape, weight.shape[0], tiles
    size = K // leaves
    while leaves > 1 and size % BK:  # a step must not reach into the next leaf
        BK //= 2
    if BK < 16 or K % 8:
        raise ContractError(f"matmul: K = {K} in {leaves} leaves; expected K a multiple of 8, leaves multiples of 16")
    park = leaves > 2 and not apart and BM * BN >= 64 * 32 * warps  # 64 registers a thread for each accumulator
    programs = triton.cdiv(M, BM) * triton.cdiv(N, BN)
    parked = torch.empty(programs, BM, BN, dtype=torch.float32, device=y.device) if park else y
    ragged, x = apart and M % BM > 0, copyable(x)
    if y.numel():
        product_kernel[programs, leaves if apart else 1](
            x if ragged else _descriptor(x, BM, BK), _descriptor(weight, BN, BK), y if bias is None else bias, y, parked, M, N, size, x.stride(0),
            bias is not None, 1 if apart else leaves, park, park and leaves == 8, ragged, BM, BN, BK, 8, apart and _early(y.device),
            num_warps=warps, num_stages=stages, **COMPILE,
        )  # fmt: skip


def copyable(x: torch.Tensor) -> torch.Tensor:
    """``x`` [R, C] bf16 as the copy engine wants it, its address and rows at multiples of 16 bytes: another view is copied."""
    return x if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 else x.contiguous()


def _descriptor(x, rows: int, columns: int) -> TensorDescriptor:
    """Blocks of ``x`` for the copy engine."""
    x = copyable(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


@functools.lru_cache(maxsize=None)
def _early(device) -> bool:
    """Whether a launch may start before the one ahead of it ends, which saves its latency: sm_90 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tree(partials, dtype, bias=None, early=False):
    """fp32 ``partials`` [G, M, N] -> the balanced tree over them (and the bias), rounded once to ``dtype``: [M, N].

    ``early``: they come from a launch just before that lets this one start.
    """
    G, M, N = partials.shape
    if G > MAX_LEAVES:
        raise ContractError(f"matmul: {G} partials on one rank; the Triton form adds up to {MAX_LEAVES}")
    y = torch.empty(M, N, dtype=dtype, device=partials.device)
    if y.numel():
        block = 256 if y.numel() <= 1 << 17 else 1024
        options = dict(COMPILE, launch_pdl=True) if early else COMPILE
        tree_kernel[triton.cdiv(y.numel(), block),](
            partials, y if bias is None else bias, y, y.numel(), N, bias is not None, G, block, early, num_warps=block // 256, **options
        )
    return y
