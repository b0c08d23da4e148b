"""Grouped matrix products in Triton: rows sorted by expert, one tile of one expert's rows per program, K ascending in one accumulator.

A row's bits depend on the row and its expert's weight alone. Few rows per expert take a form with the operands exchanged (the
weights are the tall side, 16 or 32 rows the narrow one), so that no tile is mostly padding; tests/gpu shows that every form has the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isoexec.contract import ContractError
from isoexec.ops._core.triton_math import COMPILE, dot_add, silu


class Tiles(NamedTuple):
    """(rows, columns, K step, exchanged operands, warps, pipeline stages) of one product. Committed, never tuned at run time."""

    rows: int
    columns: int
    step: int
    exchanged: bool
    warps: int
    stages: int


class Form(NamedTuple):
    """Tiles of the two products of an expert; both have the same rows."""

    gate_up: Tiles
    down: Tiles


#: Pairs per expert up to which a form serves.
FORMS = {
    16: Form(Tiles(16, 128, 128, True, 4, 3), Tiles(16, 128, 128, True, 4, 3)),
    32: Form(Tiles(32, 128, 64, True, 4, 4), Tiles(32, 64, 64, True, 4, 4)),
    96: Form(Tiles(64, 128, 64, False, 8, 3), Tiles(64, 128, 64, False, 8, 3)),
    1 << 62: Form(Tiles(128, 128, 64, False, 8, 4), Tiles(128, 128, 64, False, 8, 3)),
}
GRADIENT = Tiles(128, 128, 64, False, 8, 3)


def form_for(pairs: int, experts: int) -> Form:
    """The form for ``pairs`` spread over ``experts``; shapes only, no host read."""
    return next(form for most, form in FORMS.items() if pairs <= most * experts)


@triton.jit
def _tile(tiles, count, most, columns, GROUP: tl.constexpr):
    """This program's (tile, block of columns): GROUP neighbouring tiles share a block of weights. A tile beyond the last is ``count``."""
    group = tl.program_id(0) // (GROUP * columns)
    height = tl.minimum(most - group * GROUP, GROUP)
    inside = tl.program_id(0) - group * (GROUP * columns)
    return group * GROUP + inside % height, inside // height


@triton.jit
def _part(a, w, total, EXCHANGED: tl.constexpr, NN: tl.constexpr):
    """One K step: a [rows, step] and w [columns, step], or [step, columns] if ``NN``."""
    if EXCHANGED:
        if NN:
            return dot_add(tl.trans(w), tl.trans(a), total)
        else:
            return dot_add(w, tl.trans(a), total)
    else:
        if NN:
            return dot_add(a, w, total)
        else:
            return dot_add(a, tl.trans(w), total)


@triton.jit
def gate_up_kernel(x, w, h, saved, pair, tiles, count, most, TOP: tl.constexpr, F, D, x_stride, SAVE: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, EXCHANGED: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """h [R, F] = silu(gate) * up of tokens x [T, D]; w: descriptor [E 2 F, D]. ``SAVE``: also gate and up, rounded, [R, 2 F]."""
    tile, block = _tile(tiles, count, most, tl.cdiv(F, BN), GROUP)
    if tile < tl.load(count):
        expert = tl.load(tiles + tile)
        row = tl.load(tiles + most + tile) + tl.arange(0, BM)
        there = row < tl.load(tiles + 2 * most + tile)
        token = tl.load(pair + row, mask=there, other=0) // TOP  # rows that are absent compute those of token 0, and are not stored
        source = x + token.to(tl.int64)[:, None] * x_stride + tl.arange(0, BK)[None, :]
        first = expert * (2 * F) + block * BN
        if EXCHANGED:
            gate = tl.zeros([BN, BM], dtype=tl.float32)
        else:
            gate = tl.zeros([BM, BN], dtype=tl.float32)
        up = gate
        for k in range(0, D, BK):
            a = tl.load(source + k)
            gate = _part(a, w.load([first, k]), gate, EXCHANGED, False)
            up = _part(a, w.load([first + F, k]), up, EXCHANGED, False)
        n = block * BN + tl.arange(0, BN)
        gate = gate.to(h.dtype.element_ty)
        up = up.to(h.dtype.element_ty)
        if EXCHANGED:
            at = row.to(tl.int64)[None, :]
            n = n[:, None]
            there = there[None, :]
        else:
            at = row.to(tl.int64)[:, None]
            n = n[None, :]
            there = there[:, None]
        there = there & (n < F)
        tl.store(h + at * F + n, (silu(gate.to(tl.float32)) * up.to(tl.float32)).to(h.dtype.element_ty), mask=there)
        if SAVE:
            tl.store(saved + at * (2 * F) + n, gate, mask=there)
            tl.store(saved + at * (2 * F) + F + n, up, mask=there)


@triton.jit
def rows_kernel(a, w, y, pair, tiles, count, most, N, K, a_stride, GATHER: tl.constexpr, SCATTER: tl.constexpr, NN: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXCHANGED: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """y [.., N] = rows of ``a`` times their expert's weight, descriptor [E N, K] (``NN``: [E K, N]). ``a``: sorted rows, a descriptor, or with
    ``GATHER`` [pairs, K]. ``SCATTER``: y is by pair, else sorted."""
    tile, block = _tile(tiles, count, most, tl.cdiv(N, BN), GROUP)
    if tile < tl.load(count):
        expert = tl.load(tiles + tile)
        first = tl.load(tiles + most + tile)
        row = first + tl.arange(0, BM)
        there = row < tl.load(tiles + 2 * most + tile)
        index = row
        if GATHER or SCATTER:
            index = tl.load(pair + row, mask=there, other=0)
        if EXCHANGED:
            total = tl.zeros([BN, BM], dtype=tl.float32)
        else:
            total = tl.zeros([BM, BN], dtype=tl.float32)
        for k in range(0, K, BK):
            if GATHER:
                part = tl.load(a + index.to(tl.int64)[:, None] * a_stride + (k + tl.arange(0, BK))[None, :])
            else:
                part = a.load([first, k])
            if NN:
                weight = w.load([expert * K + k, block * BN])
            else:
                weight = w.load([expert * N + block * BN, k])
            total = _part(part, weight, total, EXCHANGED, NN)
        n = block * BN + tl.arange(0, BN)
        if not SCATTER:
            index = row
        if EXCHANGED:
            tl.store(y + index.to(tl.int64)[None, :] * N + n[:, None], total.to(y.dtype.element_ty), mask=there[None, :] & (n < N)[:, None])
        else:
            tl.store(y + index.to(tl.int64)[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])


@triton.jit
def _operand(a, pair, row, here, columns, bound, stride, BY: tl.constexpr, TOP: tl.constexpr):
    """[step, columns] of sorted rows (``BY`` 0), of pairs (1) or of the pairs' tokens (2); absent rows are +0.0 by selection."""
    index = row
    if BY == 1:
        index = tl.load(pair + row, mask=here, other=0)
    if BY == 2:
        index = tl.load(pair + row, mask=here, other=0) // TOP
    return tl.load(a + index.to(tl.int64)[:, None] * stride + columns[None, :], mask=here[:, None] & (columns < bound)[None, :], other=0.0)


@triton.jit
def weight_grad_kernel(g, a, out, pair, starts, totals, M, N, G_BY: tl.constexpr, A_BY: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr,
                       BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """out [E, M, N]: sum over an expert's rows, ascending, of g^T a; an expert without rows gets zeros."""
    e = tl.program_id(1)
    columns = tl.cdiv(N, BN)
    m = tl.program_id(0) // columns * BM + tl.arange(0, BM)
    n = tl.program_id(0) % columns * BN + tl.arange(0, BN)
    start = tl.load(starts + e)
    rows = tl.load(totals + e)
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for k in range(0, rows, BK):
        i = k + tl.arange(0, BK)
        left = _operand(g, pair, start + i, i < rows, m, M, M, G_BY, TOP)
        right = _operand(a, pair, start + i, i < rows, n, N, N, A_BY, TOP)
        total = dot_add(tl.trans(left), right, total)
    at = e.to(tl.int64) * M * N + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def token_grad_kernel(rows, place, out, D, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """A token's pairs summed in rank order, fp32, one rounding; pairs that are not held add +0.0."""
    token = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for r in range(TOP):
        at = tl.load(place + token * TOP + r).to(tl.int64)
        total += tl.load(rows + at * D + c, mask=(c < D) & (at >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * D + c, total.to(out.dtype.element_ty), mask=c < D)


def _descriptor(x, rows, columns):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def _step(K: int, step: int, what: str) -> int:
    """The largest K step up to ``step`` that divides K: no step reaches into the next expert."""
    while K % step:
        step //= 2
    if step < 16:
        raise ContractError(f"op moe.expert_mlp: {what} {K} is not a multiple of 16, which grouped products on a GPU need")
    return step


def gate_up(x, weight, plan, tiles: Tiles, save: bool, dtype=torch.bfloat16):
    """(h [R, F], gate and up [R, 2 F] or None) of the plan's rows; x [T, D], weight [E, 2 F, D]. ``dtype`` fp32: nothing is rounded."""
    E, F2, D = weight.shape
    R, F = plan.pair.shape[0], F2 // 2
    h = torch.empty(R, F, dtype=dtype, device=x.device)
    saved = torch.empty(R, F2, dtype=dtype, device=x.device) if save else None
    BK = _step(D, tiles.step, "hidden size")
    most = plan.tiles.shape[1]
    gate_up_kernel[most * triton.cdiv(F, tiles.columns),](
        x, _descriptor(weight.view(E * F2, D), tiles.columns, BK), h, saved if save else h, plan.pair, plan.tiles, plan.count, most, plan.top_k, F, D,
        x.stride(0), save, tiles.rows, tiles.columns, BK, tiles.exchanged, 8, num_warps=tiles.warps, num_stages=tiles.stages, **COMPILE,
    )  # fmt: skip
    return h, saved


def rows(a, weight, plan, tiles: Tiles, *, nn=False, gather=False, scatter=None):
    """Rows [R, N] of ``a`` [R or pairs, K] times weight [E, N, K] (``nn``: [E, K, N]); into ``scatter`` [pairs, N] where it is given."""
    E = weight.shape[0]
    N, K = (weight.shape[2], weight.shape[1]) if nn else weight.shape[1:]
    y = torch.empty(plan.pair.shape[0], N, dtype=a.dtype, device=a.device) if scatter is None else scatter
    BK = _step(K, tiles.step, "a width of")
    most = plan.tiles.shape[1]
    block = (BK, tiles.columns) if nn else (tiles.columns, BK)
    rows_kernel[most * triton.cdiv(N, tiles.columns),](
        a if gather else _descriptor(a, tiles.rows, BK), _descriptor(weight.view(E * weight.shape[1], weight.shape[2]), *block), y, plan.pair, plan.tiles,
        plan.count, most, N, K, a.stride(0), gather, scatter is not None, nn, tiles.rows, tiles.columns, BK, tiles.exchanged, 8,
        num_warps=tiles.warps, num_stages=tiles.stages, **COMPILE,
    )  # fmt: skip
    return y


SORTED, BY_PAIR, BY_TOKEN = 0, 1, 2


def weight_grad(g, a, plan, g_by: int, a_by: int):
    """[E, M, N] in bf16: each expert's g^T a; g [.., M] and a [.., N] contiguous, sorted or by pair or by token."""
    M, N, t = g.shape[-1], a.shape[-1], GRADIENT
    out = torch.empty(plan.experts, M, N, dtype=a.dtype, device=a.device)
    weight_grad_kernel[triton.cdiv(M, t.rows) * triton.cdiv(N, t.columns), plan.experts](
        g, a, out, plan.pair, plan.starts, plan.totals, M, N, g_by, a_by, plan.top_k, t.rows, t.columns, t.step, num_warps=t.warps,
        num_stages=t.stages, **COMPILE,
    )  # fmt: skip
    return out


def token_grad(sorted_rows, plan):
    """[T, D]: gradient of the tokens from that of the sorted rows [R, D]."""
    D, T = sorted_rows.shape[1], plan.place.shape[0] // plan.top_k
    out = torch.empty(T, D, dtype=sorted_rows.dtype, device=sorted_rows.device)
    token_grad_kernel[T, triton.cdiv(D, 1024)](sorted_rows, plan.place, out, D, plan.top_k, 1024, num_warps=4, **COMPILE)
    return out
