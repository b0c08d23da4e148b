"""Which rows an expert has, on the device: a counting sort of (token, expert) pairs that is stable, without atomics and without a host read.

Three launches: counts of each block of pairs, their prefix over blocks, and the places. Every shape follows from the number of pairs
and of experts, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE

_BLOCK = 128  # pairs per program


class Plan(NamedTuple):
    """Pairs (index t * k + r) by expert, then by token; ``tile_rows`` rows of one expert make a tile.

    Attributes:
        pair: [T k] int32, pair of each row; what lies beyond the last held pair is not defined.
        place: [T k] int32, row of each pair, -1 where its expert is not held.
        starts, totals: [N] int32, first row and rows of each expert, N a power of two > experts.
        tiles: [3, most] int32: a tile's expert, first row, and end of its expert's rows.
        count: [1] int32, tiles that there are.
        tile_rows: rows of a tile.
        top_k: k.
        experts: experts held.
    """

    pair: torch.Tensor
    place: torch.Tensor
    starts: torch.Tensor
    totals: torch.Tensor
    tiles: torch.Tensor
    count: torch.Tensor
    tile_rows: int
    top_k: int
    experts: int


@triton.jit
def _held(experts, i, pairs, first, E: tl.constexpr):
    """Local expert of pairs ``i``, -1 where it is not held."""
    e = tl.load(experts + i, mask=i < pairs, other=-1).to(tl.int64) - first
    return tl.where((e >= 0) & (e < E) & (i < pairs), e, -1).to(tl.int32)


@triton.jit
def count_kernel(experts, counts, pairs, first, E: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, N)
    e = _held(experts, i, pairs, first, E)
    tl.store(counts + tl.program_id(0) * N + c, tl.sum((e[:, None] == c[None, :]).to(tl.int32), 0))


@triton.jit
def prefix_kernel(counts, totals, blocks, N: tl.constexpr, BLOCK: tl.constexpr):
    """One expert: counts -> pairs in earlier blocks, in place, and its total."""
    e = tl.program_id(0)
    running = tl.sum(tl.zeros([BLOCK], dtype=tl.int32), 0)
    for first in range(0, blocks, BLOCK):
        b = first + tl.arange(0, BLOCK)
        n = tl.load(counts + b * N + e, mask=b < blocks, other=0)
        tl.store(counts + b * N + e, running + tl.cumsum(n, 0) - n, mask=b < blocks)
        running += tl.sum(n, 0)
    tl.store(totals + e, running)


@triton.jit
def place_kernel(experts, counts, totals, starts, pair, place, tiles, count, pairs, first, most, E: tl.constexpr, N: tl.constexpr,
                 ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program p places block p of pairs, and writes the tiles of expert p."""
    p = tl.program_id(0)
    c = tl.arange(0, N)
    n = tl.load(totals + c)
    start = tl.cumsum(n, 0) - n
    i = p * BLOCK + tl.arange(0, BLOCK)
    if p * BLOCK < pairs:
        e = _held(experts, i, pairs, first, E)
        j = tl.arange(0, BLOCK)
        earlier = tl.sum(((e[:, None] == e[None, :]) & (j[None, :] < j[:, None])).to(tl.int32), 1)
        base = start + tl.load(counts + p * N + c)
        at = earlier + tl.sum(tl.where(e[:, None] == c[None, :], base[None, :], 0), 1)
        tl.store(place + i, tl.where(e >= 0, at, -1), mask=i < pairs)
        tl.store(pair + at, i, mask=e >= 0)
    if p < E:
        needs = (n + ROWS - 1) // ROWS
        ahead = tl.sum(tl.where(c < p, needs, 0), 0)
        mine = tl.sum(tl.where(c == p, needs, 0), 0)
        row = tl.sum(tl.where(c == p, start, 0), 0)
        stop = row + tl.sum(tl.where(c == p, n, 0), 0)
        for t in range(0, mine, BLOCK):
            k = t + tl.arange(0, BLOCK)
            tl.store(tiles + ahead + k, p + tl.zeros([BLOCK], dtype=tl.int32), mask=k < mine)
            tl.store(tiles + most + ahead + k, row + k * ROWS, mask=k < mine)
            tl.store(tiles + 2 * most + ahead + k, stop + tl.zeros([BLOCK], dtype=tl.int32), mask=k < mine)
    if p == 0:
        tl.store(count, tl.sum((n + ROWS - 1) // ROWS, 0))
        tl.store(starts + c, start)


def make(experts: torch.Tensor, first: int, held: int, tile_rows: int) -> Plan:
    """The plan of global indices ``experts`` [T, k] int64 for experts ``first`` to ``first + held``."""
    device, pairs, N = experts.device, experts.numel(), power_of_two(held + 1)
    blocks, most = triton.cdiv(pairs, _BLOCK), min(pairs, held) + pairs // tile_rows
    ints = lambda *shape: torch.empty(shape, dtype=torch.int32, device=device)  # noqa: E731
    counts, totals, starts = ints(blocks, N), ints(N), ints(N)
    pair, place, tiles, count = ints(pairs), ints(pairs), ints(3, most), ints(1)
    flat = experts.reshape(-1)
    count_kernel[blocks,](flat, counts, pairs, first, held, N, _BLOCK, num_warps=4, **COMPILE)
    prefix_kernel[N,](counts, totals, blocks, N, min(1024, power_of_two(blocks)), num_warps=1 if blocks <= 128 else 4, **COMPILE)
    place_kernel[max(blocks, held),](
        flat, counts, totals, starts, pair, place, tiles, count, pairs, first, most, held, N, tile_rows, _BLOCK, num_warps=4, **COMPILE
    )
    return Plan(pair, place, starts, totals, tiles, count, tile_rows, experts.shape[1], held)
