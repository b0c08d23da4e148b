"""Gradients of packed causal attention in Triton, from the output and the log-sum-exp: no atomics, the same bits in every run.

P = exp(scale q k^T - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K, dK = scale dS^T Q (FlashAttention 2,
arXiv 2307.08691). One program owns a block of keys of one key head (its gradients are sums over all of its query heads, ascending), or a
block of queries of one head. The pass that computes dS first leaves it in memory as the bf16 operand that it is, in tiles of 128 queries
and 128 keys, so that the other side's gradients are one product each; for heads of 256 channels, whose two sums by keys would leave no room
for the products, that pass goes by queries and leaves P too. On sm_90 heads of 128 channels take the pass of hopper.py. Where the tiles of one
key head exceed a bound, both passes compute P and dS.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE, dot, dot_add
from isoexec.ops.attention import hopper

#: Bytes of dS (and P) that lie in memory at once: more key heads take their turns.
SAVED_BYTES = 6 << 30
_TILE = tl.constexpr(128)  # queries and keys of a tile in memory
_STEP = tl.constexpr(64)  # rows of a tile that a product takes at once
_LOG2E = tl.constexpr(1.4426950408889634)


class Tiles(NamedTuple):
    """(queries, keys, warps, stages) of the passes by keys and by queries; (warps, stages) of a product with what was saved.

    ``by_keys``: whether the pass by keys is the one that leaves dS in memory; it takes blocks of 64 then, the one by queries blocks of 128.
    """

    keys: tuple[int, int, int, int]
    queries: tuple[int, int, int, int]
    saved: tuple[int, int]
    by_keys: bool


#: Head sizes with tiles.
TILES = {
    32: Tiles((64, 64, 4, 2), (128, 64, 4, 2), (4, 2), True),
    64: Tiles((64, 64, 4, 2), (128, 64, 8, 3), (4, 3), True),
    128: Tiles((64, 64, 4, 2), (128, 64, 8, 3), (4, 3), True),
    256: Tiles((64, 64, 8, 2), (128, 64, 8, 1), (8, 3), False),
}


@triton.jit
def delta_kernel(grad, out, delta, T, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    """delta [H, T] = row sums of grad * out [T, H, K]."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    here = row < T * H
    at = row[:, None] * K + tl.arange(0, K)[None, :]
    g = tl.load(grad + at, mask=here[:, None], other=0.0).to(tl.float32)
    o = tl.load(out + at, mask=here[:, None], other=0.0).to(tl.float32)
    tl.store(delta + row % H * T + row // H, tl.sum(g * o, 1), mask=here)


@triton.jit
def _first_tile(cu_seqlens, b, N: tl.constexpr):
    """Tiles of one head's sequences before ``b``; a sequence has those on and below the diagonal."""
    i = tl.arange(0, N)
    before = i < b
    lengths = tl.load(cu_seqlens + i + 1, mask=before, other=0) - tl.load(cu_seqlens + i, mask=before, other=0)
    blocks = tl.cdiv(lengths, _TILE)
    return tl.sum(blocks * (blocks + 1) // 2, 0)


@triton.jit
def _tile(first_tile, query, key):
    """Tile of a query and a key of the sequence."""
    m = query // _TILE
    return first_tile + m * (m + 1) // 2 + key // _TILE


@triton.jit
def _turn(t, steps, low, STEP: tl.constexpr):
    """(which head of those that share a key head, first row) of turn ``t``: ``steps`` turns from row ``low`` on, head after head."""
    r = t // steps
    return r, low + (t - r * steps) * STEP


@triton.jit
def _own(x, real):
    """``x`` [rows, K] with +0.0 for rows that are not ``real``: a product with zero would keep their NaN and infinities."""
    return tl.where(real[:, None], x, 0.0)


@triton.jit
def _inside(x):
    """Row or column of a query or key within its tile."""
    return x - x // _TILE * _TILE


@triton.jit
def _keys_step(q, grad, lse, delta, k, v, saved, row, dk, dv, start, new, first, head, key, T, scale, K: tl.constexpr, BM: tl.constexpr,
               SAVE: tl.constexpr, END: tl.constexpr):  # fmt: skip
    """Adds one block of queries, ``first`` of the sequence and on, to the gradients of a block of keys; ``END``: one with rows of another sequence."""
    i = first + tl.arange(0, BM)
    real = i < new
    at = head * T + start + i
    q_MK = q.load([start + first, head * K])
    g_MK = grad.load([start + first, head * K])
    if END:
        q_MK, g_MK = _own(q_MK, real), _own(g_MK, real)
    l_M = tl.load(lse + at, mask=real, other=0.0) * _LOG2E
    d_M = tl.load(delta + at, mask=real, other=0.0)
    visible = (key[:, None] <= i[None, :]) & real[None, :]
    p_NM = tl.where(visible, tl.exp2(dot(k, tl.trans(q_MK)) * (scale * _LOG2E) - l_M[None, :]), 0.0)
    dv = dot_add(p_NM.to(tl.bfloat16), g_MK, dv)
    ds_NM = tl.where(visible, p_NM * (dot(v, tl.trans(g_MK)) - d_M[None, :]), 0.0).to(tl.bfloat16)
    if SAVE:
        rows = (row + tl.arange(0, ds_NM.shape[0])).to(tl.int64)
        columns = tl.multiple_of(_inside(first), BM) + tl.arange(0, BM)
        tl.store(saved + rows[:, None] * _TILE + columns[None, :], ds_NM)
    return dot_add(ds_NM, q_MK, dk), dv


@triton.jit
def keys_kernel(q, keys, values, grad, lse, delta, saved, grad_k, grad_v, cu_seqlens, T, scale, tiles, first_group, groups, G: tl.constexpr,
                REPEAT: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
                SAVE: tl.constexpr):  # fmt: skip
    """Program (sequence and key head, block of keys); the blocks with most queries come first. ``SAVE``: dS transposed to ``saved``."""
    b = tl.program_id(0) // groups
    local = tl.program_id(0) % groups
    g = first_group + local
    start = tl.load(cu_seqlens + b)
    new = tl.load(cu_seqlens + b + 1) - start
    n = tl.program_id(1) * BN
    if n < new:
        key = n + tl.arange(0, BN)
        k = keys.load([start + n, g * K])
        v = values.load([start + n, g * K])
        dk = tl.zeros([BN, K], dtype=tl.float32)
        dv = tl.zeros([BN, K], dtype=tl.float32)
        low = n
        first_tile = 0
        if SAVE:  # whole tiles: what no query sees is zero
            low = n // _TILE * _TILE
            first_tile = local * REPEAT * tiles + _first_tile(cu_seqlens, b, N)
        steps = (new - low) // BM
        for t in range(REPEAT * steps):
            r, first = _turn(t, steps, low, BM)
            row = _tile(first_tile + r * tiles, first, n) * _TILE + _inside(n)
            head = g * REPEAT + r
            dk, dv = _keys_step(q, grad, lse, delta, k, v, saved, row, dk, dv, start, new, first, head, key, T, scale, K, BM, SAVE, False)
        last = low + steps * BM
        if last < new:
            for r in range(REPEAT):
                row = _tile(first_tile + r * tiles, last, n) * _TILE + _inside(n)
                head = g * REPEAT + r
                dk, dv = _keys_step(q, grad, lse, delta, k, v, saved, row, dk, dv, start, new, last, head, key, T, scale, K, BM, SAVE, True)
        at = ((start + key).to(tl.int64) * G + g)[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(grad_k + at, (dk * scale).to(grad_k.dtype.element_ty), mask=(key < new)[:, None])
        tl.store(grad_v + at, dv.to(grad_v.dtype.element_ty), mask=(key < new)[:, None])


@triton.jit
def _queries_step(keys, values, q, g, l_M, d_M, p, ds, first_tile, dq, start, new, first, m, column, i, scale, BN: tl.constexpr,
                  MASK: tl.constexpr, END: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    """Adds one block of keys to the gradients of a block of queries; ``END``: one with rows of another sequence."""
    k_NK = keys.load([start + first, column])
    v_NK = values.load([start + first, column])
    p_MN = tl.exp2(dot(q, tl.trans(k_NK)) * (scale * _LOG2E) - l_M[:, None])
    if MASK:
        p_MN = tl.where((first + tl.arange(0, BN))[None, :] <= i[:, None], p_MN, 0.0)
    ds_MN = p_MN * (dot(g, tl.trans(v_NK)) - d_M[:, None])
    if MASK:
        ds_MN = tl.where((first + tl.arange(0, BN))[None, :] <= i[:, None], ds_MN, 0.0)
    rounded = ds_MN.to(tl.bfloat16)
    if SAVE:
        row = _tile(first_tile, m, first) * _TILE
        p.store([row, _inside(first)], p_MN.to(tl.bfloat16))
        ds.store([row, _inside(first)], rounded)
    if END:
        k_NK = _own(k_NK, first + tl.arange(0, BN) < new)
    return dot_add(rounded, k_NK, dq)


@triton.jit
def queries_kernel(q, keys, values, grad, lse, delta, p, ds, grad_q, cu_seqlens, T, scale, tiles, first_head, heads, H: tl.constexpr,
                   REPEAT: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
                   SAVE: tl.constexpr):  # fmt: skip
    """Program (sequence and head, block of queries); the blocks that see most keys come first. ``SAVE``: P and dS to ``p`` and ``ds``."""
    b = tl.program_id(0) // heads
    local = tl.program_id(0) % heads
    head = first_head + local
    start = tl.load(cu_seqlens + b)
    new = tl.load(cu_seqlens + b + 1) - start
    block = tl.cdiv(new, BM) - 1 - tl.program_id(1)
    if block >= 0:
        m = block * BM
        i = m + tl.arange(0, BM)
        at = head * T + start + i
        l_M = tl.load(lse + at, mask=i < new, other=float("inf")) * _LOG2E  # P of a row that does not exist is zero
        d_M = tl.load(delta + at, mask=i < new, other=0.0)
        q_MK = q.load([start + m, head * K])
        g_MK = grad.load([start + m, head * K])
        dq = tl.zeros([BM, K], dtype=tl.float32)
        column = head // REPEAT * K
        first_tile = 0
        if SAVE:
            first_tile = local * tiles + _first_tile(cu_seqlens, b, N)
        whole = m // BN * BN
        stop = tl.minimum(m + BM, new)
        end = whole + (stop - whole) // BN * BN
        for first in range(0, whole, BN):
            dq = _queries_step(keys, values, q_MK, g_MK, l_M, d_M, p, ds, first_tile, dq, start, new, first, m, column, i, scale, BN, False,
                               False, SAVE)  # fmt: skip
        for first in range(whole, end, BN):
            dq = _queries_step(keys, values, q_MK, g_MK, l_M, d_M, p, ds, first_tile, dq, start, new, first, m, column, i, scale, BN, True,
                               False, SAVE)  # fmt: skip
        if end < stop:
            dq = _queries_step(keys, values, q_MK, g_MK, l_M, d_M, p, ds, first_tile, dq, start, new, end, m, column, i, scale, BN, True,
                               True, SAVE)  # fmt: skip
        place = ((start + i).to(tl.int64) * H + head)[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(grad_q + place, (dq * scale).to(grad_q.dtype.element_ty), mask=(i < new)[:, None])


@triton.jit
def saved_kernel(saved, rows, out, cu_seqlens, factor, tiles, first_head, heads, OUT: tl.constexpr, REPEAT: tl.constexpr, K: tl.constexpr,
                 N: tl.constexpr, KEYS: tl.constexpr):  # fmt: skip
    """Saved tiles, transposed, times rows of q or grad (``KEYS``: for a block of keys) or of the keys, whose tiles have keys for rows.

    Program (sequence and head of ``out`` [T, OUT, K], block), the longest sums first.
    """
    b = tl.program_id(0) // heads
    local = tl.program_id(0) % heads
    head = first_head + local
    start = tl.load(cu_seqlens + b)
    new = tl.load(cu_seqlens + b + 1) - start
    blocks = tl.cdiv(new, _TILE)
    block = tl.program_id(1) if KEYS else blocks - 1 - tl.program_id(1)
    if (block >= 0) & (block < blocks):
        own = block * _TILE
        total = tl.zeros([_TILE, K], dtype=tl.float32)
        low = own if KEYS else 0
        stop = new if KEYS else tl.minimum(own + _TILE, new)
        steps = (stop - low) // _STEP
        first_tile = _first_tile(cu_seqlens, b, N) + local * (REPEAT if KEYS else 1) * tiles
        for t in range((REPEAT if KEYS else 1) * steps):
            r, first = _turn(t, steps, low, _STEP)
            tile = _tile(first_tile + r * tiles, first, own) if KEYS else _tile(first_tile, own, first)
            column = (head * REPEAT + r if KEYS else head // REPEAT) * K
            total = dot_add(tl.trans(saved.load([tile * _TILE + _inside(first), 0])), rows.load([start + first, column]), total)
        last = low + steps * _STEP
        if last < stop:  # a block with rows of another sequence
            real = last + tl.arange(0, _STEP) < new
            for r in range(REPEAT if KEYS else 1):
                tile = _tile(first_tile + r * tiles, last, own) if KEYS else _tile(first_tile, own, last)
                column = (head * REPEAT + r if KEYS else head // REPEAT) * K
                saved_rows = tl.trans(_own(saved.load([tile * _TILE + _inside(last), 0]), real))
                total = dot_add(saved_rows, _own(rows.load([start + last, column]), real), total)
        i = own + tl.arange(0, _TILE)
        place = ((start + i).to(tl.int64) * OUT + head)[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(out + place, (total * factor).to(out.dtype.element_ty), mask=(i < new)[:, None])


def _rows(x, rows):
    """[T, H, K] as blocks [rows, K] of one head's tokens. A block may reach into the next sequence, whose rows may hold anything: they and
    their scores are selected away."""
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]])


def _packed(x):
    """``x`` [T, H, K] with adjacent heads, and tokens at multiples of 16 bytes."""
    plain = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if plain else x.contiguous()


def _tiles(T, sequences, longest):
    """Bound of one head's tiles in memory, which needs no lengths."""
    edge = _TILE.value
    return (T // edge + sequences) * (triton.cdiv(longest, edge) + 1) // 2


def tile_bytes(repeat, K, T, sequences, longest):
    """Bytes of the tiles of one key head and its ``repeat`` query heads of ``K`` channels."""
    return (1 if TILES[K].by_keys else 2) * repeat * _tiles(T, sequences, longest) * _TILE.value**2 * 2


class _Saved(NamedTuple):
    """Memory of tiles [tiles * 128, 128] bf16."""

    x: torch.Tensor

    def blocks(self, rows, columns):
        return TensorDescriptor(self.x, list(self.x.shape), [self.x.shape[1], 1], [rows, columns])


class _Problem:
    """What every launch takes."""

    def __init__(self, grad, q, k, v, cu_seqlens, lse, scale, longest):
        self.q, self.k, self.v, self.grad, self.lse, self.cu, self.scale = q, k, v, grad, lse, cu_seqlens, scale
        (self.T, self.H, self.K), self.G = q.shape, k.shape[1]
        self.repeat, self.sequences, self.longest = self.H // self.G, cu_seqlens.shape[0] - 1, longest
        self.N, self.tiles, self.form = power_of_two(self.sequences), _tiles(self.T, self.sequences, longest), TILES[self.K]

    def sum_rows(self, out, save):
        """Row sums of dO O, and the log-sum-exp, where the pass that comes looks for them."""
        self.padded = hopper.rows(self.grad, out, self.lse, self.cu, self.longest) if save and hopper.serves(self.q) else None
        if self.padded is None:
            self.delta, R = torch.empty_like(self.lse), 4096 // self.K
            delta_kernel[triton.cdiv(self.T * self.H, R),](self.grad, out, self.delta, self.T, self.H, self.K, R, num_warps=4, **COMPILE)

    def turns(self, budget):
        """Ranges (first key head, number) whose saved tiles fit ``budget``; one of all, and False, where those of one key head do not."""
        each = tile_bytes(self.repeat, self.K, self.T, self.sequences, self.longest)
        if each > budget:
            return [(0, self.G)], False
        count = triton.cdiv(self.G, min(budget // max(each, 1), self.G))
        bounds = [self.G * i // count for i in range(count + 1)]
        return [(low, high - low) for low, high in zip(bounds, bounds[1:])], True

    def memory(self, groups):
        edge = _TILE.value
        return _Saved(torch.empty(groups * self.repeat * self.tiles * edge, edge, dtype=torch.bfloat16, device=self.q.device))

    def by_keys(self, saved, grads, first, groups):
        if self.padded is not None:
            inputs = self.q, self.k, self.v, self.grad, self.padded, saved.x, *grads[1:], self.cu, self.scale, self.longest
            hopper.by_keys(*inputs, self.tiles, first, groups, self.N)
            return
        BM, BN, warps, stages = self.form.keys
        keys_kernel[self.sequences * groups, triton.cdiv(self.longest, BN)](
            _rows(self.q, BM), _rows(self.k, BN), _rows(self.v, BN), _rows(self.grad, BM), self.lse, self.delta,
            None if saved is None else saved.x, grads[1], grads[2], self.cu, self.T, self.scale, self.tiles, first, groups, self.G,
            self.repeat, self.K, BM, BN, self.N,
            saved is not None, num_warps=warps, num_stages=stages, **COMPILE,
        )  # fmt: skip

    def by_queries(self, saved, grads, first, groups):
        BM, BN, warps, stages = self.form.queries
        p, ds = (x.blocks(BM, BN) for x in saved) if saved else (None, None)
        queries_kernel[self.sequences * groups * self.repeat, triton.cdiv(self.longest, BM)](
            _rows(self.q, BM), _rows(self.k, BN), _rows(self.v, BN), _rows(self.grad, BM), self.lse, self.delta, p, ds, grads[0], self.cu,
            self.T, self.scale, self.tiles, first * self.repeat, groups * self.repeat, self.H, self.repeat, self.K, BM, BN, self.N,
            saved is not None, num_warps=warps, num_stages=stages, **COMPILE,
        )  # fmt: skip

    def with_saved(self, saved, rows, out, factor, first, groups, keys):
        each, (warps, stages) = 1 if keys else self.repeat, self.form.saved
        saved_kernel[self.sequences * groups * each, triton.cdiv(self.longest, _TILE.value)](
            saved.blocks(_STEP.value, _TILE.value), _rows(rows, _STEP.value), out, self.cu, factor, self.tiles, first * each, groups * each,
            out.shape[1], self.repeat, self.K, self.N, keys, num_warps=warps, num_stages=stages, **COMPILE,
        )  # fmt: skip


def gradients(grad, q, k, v, cu_seqlens, out, lse, scale, longest, budget=SAVED_BYTES):
    """Gradients (q, k, v) in their dtypes.

    Args:
        grad, q, out: [T, H, K] bf16; k, v: [T, G, K] bf16; cu_seqlens: [B + 1] int32; lse: [H, T] fp32.
        longest: bound of the sequences' lengths.
        budget: bytes of dS and P in memory at once.
    """
    grad, out = grad.contiguous(), out.contiguous()
    q, k, v = (_packed(x) for x in (q, k, v))
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    problem = _Problem(grad, q, k, v, cu_seqlens, lse.contiguous(), scale, longest)
    turns, save = problem.turns(budget)
    problem.sum_rows(out, save)
    memory = [problem.memory(max(groups for _, groups in turns)) for _ in range(1 if problem.form.by_keys else 2)] if save else []
    for turn in turns:
        if not save:
            problem.by_keys(None, grads, *turn)
            problem.by_queries(None, grads, *turn)
        elif problem.form.by_keys:
            problem.by_keys(memory[0], grads, *turn)
            problem.with_saved(memory[0], k, grads[0], scale, *turn, False)
        else:
            problem.by_queries(memory, grads, *turn)
            problem.with_saved(memory[1], q, grads[1], scale, *turn, True)
            problem.with_saved(memory[0], grad, grads[2], 1.0, *turn, True)
    return grads
