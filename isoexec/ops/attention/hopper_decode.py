"""Decode on sm_90 with the bits of FlashAttention 3's one split, by more programs than it has: a split of the execution, not of the numbers.

One split is one chain of blocks of keys, from the last to the first. Serial in it are only a maximum, a row sum and the sum over keys of each
channel, so that programs share out the scores by keys, and the rest by channels, and every number sees the operations it would see in one program.
Each operation below is the one that the compiled provider executes (its SASS), flushes and contractions included.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE
from isoexec.ops.attention.fa3 import PAGE_SIZES

#: Keys of one step of the provider's chain, by head size.
BLOCK = {128: 128, 192: 96, 256: 80}
#: Pairs of sequence and key head up to which this form is faster than the provider's (bench/results.csv); both give the same bits.
PAIRS = {128: 64, 192: 44, 256: 64}
HEADS = 16  # query heads a key head, at most
LONGEST = 1 << 20  # keys of a sequence, at most
SCORE_BYTES = 256 << 20  # of memory for the scores, at most
_LOG2E = 1.4426950408889634
#: Keys that a row of scores is a multiple of: whole blocks and whole tiles of 64.
_WHOLE = {128: 128, 192: 192, 256: 320}
#: Committed, never tuned at run time: stages of a program of scores, such programs on a processor, registers of a thread, and bytes of shared memory
#: that the stages of a chain may take.
_SCORE_STAGES, _RESIDENT, _REGISTERS, _SHARED = 2, {128: 4, 192: 2, 256: 2}, 168, 220_000


@gluon.jit
def _mul(x, y):
    return gl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _add(x, y):
    return gl.inline_asm_elementwise("add.ftz.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _fma(x, y, z):
    return gl.inline_asm_elementwise("fma.rn.ftz.f32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _halves(x, n: gl.constexpr):
    """[R, 4, n] -> its first and last n / 2 columns."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 4, 2, n // 2]), (0, 1, 3, 2)))


@gluon.jit
def _peak(x, n: gl.constexpr):
    """Maximum of each row's n columns."""
    if n == 1:
        return gl.max(gl.reshape(x, [x.shape[0], 4]), 1)
    else:
        low, high = _halves(x, n)
        return _peak(gl.maximum(low, high), n // 2)


@gluon.jit
def _chain(total, x, n: gl.constexpr):
    """total + x[:, :, 0] + x[:, :, 1] + ..., one after the other."""
    if n == 1:
        return _add(total, gl.convert_layout(gl.reshape(x, [x.shape[0], 4]), total.type.layout))
    else:
        low, high = _halves(x, n)
        return _chain(_chain(total, low, n // 2), high, n // 2)


@gluon.jit
def _chain_scaled(total, alpha, x, n: gl.constexpr):
    """The same, of alpha * total, whose product is contracted with the first addition."""
    if n == 1:
        return _fma(alpha, total, gl.convert_layout(gl.reshape(x, [x.shape[0], 4]), total.type.layout))
    else:
        low, high = _halves(x, n)
        return _chain(_chain_scaled(total, alpha, low, n // 2), high, n // 2)


@gluon.jit
def _by_lane(p):
    """[R, W] -> [R, 4, W / 4]: columns 8 i + 2 t and 8 i + 2 t + 1, in that order, of lane t of the four that share a row."""
    R: gl.constexpr = p.shape[0]
    W: gl.constexpr = p.shape[1]
    return gl.reshape(gl.permute(gl.reshape(p, [R, W // 8, 4, 2]), (0, 2, 1, 3)), [R, 4, W // 4])


@gluon.jit
def _rows_64(x):
    """[32, ...] -> [64, ...] with each 8 rows twice, as registers of the threads that have them; 64 rows are left as they are."""
    if x.shape[0] == 64:
        return x
    elif len(x.shape) == 1:
        return gl.reshape(gl.permute(gl.reshape(gl.join(x, x), [4, 8, 2]), (0, 2, 1)), [64])
    else:
        return gl.reshape(gl.permute(gl.reshape(gl.join(x, x), [4, 8, x.shape[1], 2]), (0, 3, 1, 2)), [64, x.shape[1]])


@gluon.jit
def _step(one, two, m, total, scale, LEFT: gl.constexpr):
    """Scores of a block -> (maximum, row sums by lane, factor of what came before, probabilities as left operands)."""
    peak = _peak(_by_lane(one), one.shape[1] // 4)
    peak_two = _peak(_by_lane(two), two.shape[1] // 4)
    seen = gl.maximum(m, gl.maximum(gl.convert_layout(peak, m.type.layout), gl.convert_layout(peak_two, m.type.layout)))
    alpha = _exp2(_mul(_add(m, -seen), scale))
    base = -_mul(seen, scale)
    p_one = _exp2(_fma(one, scale, base[:, None]))
    p_two = _exp2(_fma(two, scale, gl.convert_layout(base, gl.SliceLayout(1, two.type.layout))[:, None]))
    of_total = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None]
    total = _chain_scaled(total, of_total, _by_lane(p_one), one.shape[1] // 4)
    total = _chain(total, _by_lane(p_two), two.shape[1] // 4)
    left_one = gl.convert_layout(_rows_64(p_one.to(gl.bfloat16)), LEFT)
    left_two = gl.convert_layout(_rows_64(p_two.to(gl.bfloat16)), LEFT)
    return seen, total, alpha, left_one, left_two


@gluon.jit
def _hide(s, keys):
    """Scores of the block whose first ``keys`` keys exist."""
    key = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where((key < keys)[None, :], s, float("-inf"))


@gluon.jit
def _page(key, inverse):
    """Which page of its sequence holds ``key`` >= 0; ``inverse``: 2**30 over the page's size in 16 keys, rounded up, which is exact below LONGEST."""
    return gl.umulhi((key >> 4) << 2, inverse)


@gluon.jit
def _load_pages(table, first, last, inverse, W: gl.constexpr, LAYOUT: gl.constexpr):
    """Pages of keys first, first + 1, ..., or of the nearest that exists."""
    key = first + gl.arange(0, W, gl.SliceLayout(1, LAYOUT))
    return gl.load(table + _page(gl.maximum(gl.minimum(key, last), 0), inverse))


@gluon.jit
def _copy(keys, tile, pages, first, length, k_page, k_token, page_size, inverse, K: gl.constexpr, LAYOUT: gl.constexpr):
    """A tile of keys from ``first`` on; rows beyond the sequence and channels beyond K are set to zero."""
    key = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    at = pages * (k_page // 8) + (key - _page(key, inverse) * page_size) * (k_token // 8)  # in 16 bytes
    channel = gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    mask = (key < length)[:, None] & (channel < K)[None, :]
    async_copy.async_copy_global_to_shared(tile, keys + (at.to(gl.int64) * 8)[:, None] + channel[None, :], mask=mask)


@gluon.jit(do_not_specialize=["table_row", "page_size", "inverse", "G"])
def scores_kernel(q, keys, scores, block_table, seq_lens, query_start_loc, q_token, q_head, k_page, k_token, k_head, table_row, page_size,
                  inverse, bound, G, REPEAT: gl.constexpr, K: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Program (part, sequence and key head): every ``grid[0]``-th tile of 64 keys of the sequence, to scores [B * G, REPEAT, bound], unscaled."""
    TILE: gl.constexpr = 64
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, N], gl.bfloat16)
    b = gl.program_id(1) // G
    g = gl.program_id(1) % G
    token = gl.load(query_start_loc + b)
    new = gl.load(query_start_loc + b + 1) - token
    length = gl.load(seq_lens + b)
    tiles = gl.cdiv(length, TILE)
    part = gl.program_id(0)
    step = gl.num_programs(0)
    if (new > 0) & (part < tiles):
        row = gl.arange(0, TILE, gl.SliceLayout(1, COPY))
        channel = gl.arange(0, N, gl.SliceLayout(0, COPY))
        at = (row * q_head)[:, None] + channel[None, :]
        of_q = q + (token.to(gl.int64) * q_token + g * REPEAT * q_head)
        held = gl.allocate_shared_memory(gl.bfloat16, [TILE, N], SHARED, gl.load(of_q + at, mask=(row < REPEAT)[:, None] & (channel < K)[None, :], other=0.0))
        ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, N], SHARED)
        table = block_table + b * table_row
        channels = keys + g * k_head
        head = gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
        to = scores + ((gl.program_id(1) * REPEAT + head).to(gl.int64) * bound)[:, None] + gl.arange(0, TILE, gl.SliceLayout(0, SUMS))[None, :]
        none = gl.zeros([TILE, TILE], gl.float32, SUMS)
        for s in gl.static_range(STAGES - 1):
            ahead = (part + s * step) * TILE
            pages = _load_pages(table, ahead, length - 1, inverse, TILE, COPY)
            _copy(channels, ring.index(s), pages, ahead, length, k_page, k_token, page_size, inverse, K, COPY)
            async_copy.commit_group()
        pages = _load_pages(table, (part + (STAGES - 1) * step) * TILE, length - 1, inverse, TILE, COPY)
        count = gl.cdiv(tiles - part, step)
        for i in range(count):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            gl.thread_barrier()  # what every thread copied is there, and the product before this one has read its tile
            found = warpgroup_mma(held, ring.index(i % STAGES).permute((1, 0)), none, use_acc=False, is_async=True)
            ahead = (part + (i + STAGES - 1) * step) * TILE
            _copy(channels, ring.index((i + STAGES - 1) % STAGES), pages, ahead, length, k_page, k_token, page_size, inverse, K, COPY)
            async_copy.commit_group()
            pages = _load_pages(table, ahead + step * TILE, length - 1, inverse, TILE, COPY)
            found = warpgroup_mma_wait(0, deps=(found,))
            # What follows the sequence in its last tile is stored too: nothing reads it, and the workspace ends no earlier.
            gl.store(to + (part + i * step) * TILE, found, mask=(head < REPEAT)[:, None])


@gluon.jit
def _bring(values, wide, narrow, table, ring_one, ring_two, scores_one, scores_two, ready, free, length, blocks, page_rows, row, column, score_row,
           page_size, inverse, REPEAT: gl.constexpr, R: gl.constexpr, N: gl.constexpr, TWO: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The copying warp: scores and values of every block; 16 keys' values a copy, since a page is a multiple of as many."""
    BLOCK: gl.constexpr = 64 + TWO
    HEADS: gl.constexpr = 8 if REPEAT <= 8 else 16
    CHUNK: gl.constexpr = 32 if TWO > 16 else 16  # columns of a copy of the second part's scores
    last = (length - 1) // 16 * 16  # what follows the sequence has a probability of zero, and must be finite
    for i in range(blocks):
        slot = i % STAGES
        first = (blocks - 1 - i) * BLOCK
        mbarrier.wait(free.index(slot), ((i // STAGES) & 1) ^ 1)
        full = ready.index(slot)
        mbarrier.expect(full, BLOCK * N * 2 + HEADS * BLOCK * 4)
        for half in gl.static_range(HEADS // 8):
            for j in gl.static_range(2):
                tile = scores_one.index((slot * 2 + j) * (R // 8) + half)
                tma.async_copy_global_to_shared(wide, [score_row + 8 * half, first + 32 * j], full, tile)
            for j in gl.static_range(TWO // CHUNK):
                tile = scores_two.index((slot * (TWO // CHUNK) + j) * (R // 8) + half)
                tma.async_copy_global_to_shared(narrow, [score_row + 8 * half, first + 64 + CHUNK * j], full, tile)
        for j in gl.static_range(4):
            key = gl.maximum(gl.minimum(first + 16 * j, last), 0)
            page = _page(key, inverse)
            at = gl.load(table + page) * page_rows + (key - page * page_size)
            tma.async_copy_global_to_shared(values, [row + at, column], full, ring_one.index(slot * 4 + j))
        for j in gl.static_range(TWO // 16):
            key = gl.maximum(gl.minimum(first + 64 + 16 * j, last), 0)
            page = _page(key, inverse)
            at = gl.load(table + page) * page_rows + (key - page * page_size)
            tma.async_copy_global_to_shared(values, [row + at, column], full, ring_two.index(slot * (TWO // 16) + j))


@gluon.jit
def _chain_of_blocks(out, lse, ring_one, ring_two, scores_one, scores_two, ready, free, length, blocks, scale, token, tokens, first_head, heads, part,
                     REPEAT: gl.constexpr, R: gl.constexpr, K: gl.constexpr, N: gl.constexpr, TWO: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """A warpgroup: the chain from the last block to the first. Rows of scores beyond the heads hold whatever is there, and lead to no output."""
    ONE: gl.constexpr = 64
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    TWICE: gl.constexpr = [] if R == 32 else [[8, 0]]
    FIRST: gl.constexpr = gl.DistributedLinearLayout([[0, 1]] + TWICE + [[0, 8], [0, 16], [0, 32]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
                                                     [[R // 4, 0], [R // 2, 0]], [], [R, ONE])  # fmt: skip
    MORE: gl.constexpr = [[0, 8]] if TWO == 16 else ([[0, 8], [0, 16]] if TWO == 32 else [[0, 8], [0, 16], [0, 32]])
    LAST: gl.constexpr = gl.DistributedLinearLayout([[0, 1]] + TWICE + MORE, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
                                                    [[R // 4, 0], [R // 2, 0]], [], [R, TWO])  # fmt: skip
    LANES: gl.constexpr = gl.DistributedLinearLayout(TWICE, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[R // 4, 0], [R // 2, 0]], [], [R, 4])
    ROWS: gl.constexpr = gl.SliceLayout(1, FIRST)
    tiles_one = ring_one._reinterpret(gl.bfloat16, [STAGES, ONE, N], gl.NVMMASharedLayout.get_default_for([ONE, N], gl.bfloat16))
    tiles_two = ring_two._reinterpret(gl.bfloat16, [STAGES, TWO, N], gl.NVMMASharedLayout.get_default_for([TWO, N], gl.bfloat16))
    rows_one = scores_one._reinterpret(gl.float32, [STAGES, R, ONE], gl.NVMMASharedLayout.get_default_for([R, ONE], gl.float32))
    rows_two = scores_two._reinterpret(gl.float32, [STAGES, R, TWO], gl.NVMMASharedLayout.get_default_for([R, TWO], gl.float32))
    m = gl.full([R], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([R, 4], gl.float32, LANES)
    acc = gl.zeros([64, N], gl.float32, SUMS)
    mbarrier.wait(ready.index(0), 0)
    first = (blocks - 1) * (ONE + TWO)
    one = _hide(rows_one.index(0).load(FIRST), length - first)
    two = _hide(rows_two.index(0).load(LAST), length - first - ONE)
    m, total, alpha, left_one, left_two = _step(one, two, m, total, scale, LEFT)
    for i in range(blocks - 1):
        slot = i % STAGES
        following = (i + 1) % STAGES
        mbarrier.wait(ready.index(following), ((i + 1) // STAGES) & 1)
        one = rows_one.index(following).load(FIRST)
        two = rows_two.index(following).load(LAST)
        acc = _mul(acc, gl.convert_layout(_rows_64(alpha), gl.SliceLayout(1, SUMS))[:, None])
        sums = warpgroup_mma(left_one, tiles_one.index(slot), acc, is_async=True)
        sums = warpgroup_mma(left_two, tiles_two.index(slot), sums, is_async=True)
        m, total, alpha, next_one, next_two = _step(one, two, m, total, scale, LEFT)
        acc, left_one, left_two = warpgroup_mma_wait(0, deps=(sums, left_one, left_two))
        mbarrier.arrive(free.index(slot), count=1)
        left_one = next_one
        left_two = next_two
    slot = (blocks - 1) % STAGES
    acc = _mul(acc, gl.convert_layout(_rows_64(alpha), gl.SliceLayout(1, SUMS))[:, None])
    sums = warpgroup_mma(left_one, tiles_one.index(slot), acc, is_async=True)
    sums = warpgroup_mma(left_two, tiles_two.index(slot), sums, is_async=True)
    acc, left_one, left_two = warpgroup_mma_wait(0, deps=(sums, left_one, left_two))
    # Of the four lanes of a row: 0 + 2 and 1 + 3 first.
    l = gl.convert_layout(gl.sum(gl.sum(gl.reshape(total, [R, 2, 2]), 1), 1), ROWS)
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [l], dtype=gl.float32, is_pure=True, pack=1)
    log = gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [l], dtype=gl.float32, is_pure=True, pack=1)
    head = gl.arange(0, 64, gl.SliceLayout(1, SUMS))
    channel = part * N + gl.arange(0, N, gl.SliceLayout(0, SUMS))
    acc = _mul(acc, gl.convert_layout(_rows_64(inverse), gl.SliceLayout(1, SUMS))[:, None])
    acc = gl.where(length > 0, acc, 0.0)
    to = (token.to(gl.int64) * heads + first_head + head)[:, None] * K + channel[None, :]
    gl.store(out + to, acc.to(gl.bfloat16), mask=(head < REPEAT)[:, None] & (channel < K)[None, :])
    if part == 0:
        LN2: gl.constexpr = 0.69314718246459960938
        found = _fma(m, _mul(gl.full([R], LN2, gl.float32, ROWS), scale), _mul(log, gl.full([R], LN2, gl.float32, ROWS)))
        row = gl.arange(0, R, ROWS)
        gl.store(lse + (first_head + row).to(gl.int64) * tokens + token, gl.where(length > 0, found, float("-inf")), mask=row < REPEAT)


@gluon.jit(do_not_specialize=["tokens", "page_rows", "head_rows", "head_columns", "table_row", "page_size", "inverse", "G"])
def chain_kernel(wide, narrow, values, out, lse, block_table, seq_lens, query_start_loc, scale, tokens, page_rows, head_rows, head_columns, table_row,
                 page_size, inverse, G, REPEAT: gl.constexpr, R: gl.constexpr, K: gl.constexpr, N: gl.constexpr, TWO: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Program (slice of N channels, sequence and key head): the chain of blocks of 64 + TWO keys. ``scale``: of base-two exponents.

    Tensor descriptors: wide and narrow of the scores [B * G * REPEAT, bound] in blocks of 8 rows, values of the cache's rows in blocks of 16 keys.
    R = 32 for up to 8 query heads a key head, each held once, and 64 for up to 16.
    """
    part = gl.program_id(0)
    b = gl.program_id(1) // G
    g = gl.program_id(1) % G
    token = gl.load(query_start_loc + b)
    new = gl.load(query_start_loc + b + 1) - token
    length = gl.load(seq_lens + b)
    blocks = gl.maximum(gl.cdiv(length, 64 + TWO), 1)
    ring_one = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, 16, N], values.layout)
    ring_two = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (TWO // 16), 16, N], values.layout)
    scores_one = gl.allocate_shared_memory(gl.float32, [STAGES * 2 * (R // 8), 8, 32], wide.layout)
    scores_two = gl.allocate_shared_memory(gl.float32, [STAGES * (R // 8) if TWO == 16 else STAGES * (TWO // 32) * (R // 8), 8, 16 if TWO == 16 else 32],
                                           narrow.layout)  # fmt: skip
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    if new > 0:
        gl.warp_specialize(
            [
                (_chain_of_blocks, (out, lse, ring_one, ring_two, scores_one, scores_two, ready, free, length, blocks, scale, token, tokens, g * REPEAT,
                                    G * REPEAT, part, REPEAT, R, K, N, TWO, STAGES)),
                (_bring, (values, wide, narrow, block_table + b * table_row, ring_one, ring_two, scores_one, scores_two, ready, free, length, blocks,
                          page_rows, g * head_rows, g * head_columns + part * N, gl.program_id(1) * REPEAT, page_size, inverse, REPEAT, R, N, TWO,
                          STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip


def serves(q, key_cache, value_cache, block_table) -> bool:
    """Whether a batch of at most one new token a sequence takes this form: its bits do not depend on it, its time does."""
    (_, H, K), (_, page, G, _), B = q.shape, key_cache.shape, block_table.shape[0]
    if K not in BLOCK or page not in PAGE_SIZES or H // G > HEADS or not 0 < B * G <= PAIRS[K] or q.stride(2) != 1:
        return False
    longest = block_table.shape[1] * page
    scores = B * H * (longest + _WHOLE[K]) * 4
    return longest <= LONGEST and scores <= SCORE_BYTES and all(map(_reachable, (key_cache, value_cache)))


def _reachable(cache) -> bool:
    """Whether the cache is rows at one distance, 16 bytes aligned, whose offsets fit what the kernels count in.

    Heads are a multiple of 16 channels apart: by the compiler's rules an odd multiple of 8 may be any number, which scores_kernel cannot copy by.
    """
    of_page, of_token, of_head, of_channel = cache.stride()
    steps = of_channel == 1 and of_token > 0 and of_page % of_token == 0 and (of_head < of_token or of_head % of_token == 0)
    aligned = cache.data_ptr() % 16 == 0 and of_page % 8 == of_token % 8 == of_head % 16 == 0
    return steps and aligned and cache.shape[0] * of_page < 2**34 and cache.shape[0] * of_page // of_token < 2**31


def _rows(cache, columns):
    """(tensor descriptor of a cache [pages, page, G, K] as rows, 16 keys and ``columns`` channels a block; rows a page, rows and columns a head)"""
    (pages, page, G, K), (of_page, of_token, of_head, _) = cache.shape, cache.stride()
    rows, columns_apart = (of_head // of_token, 0) if of_head >= of_token else (0, of_head)
    shape = [(pages - 1) * (of_page // of_token) + (G - 1) * rows + page, (G - 1) * columns_apart + K]
    return _descriptor(cache, shape, [of_token, 1], [16, columns]), of_page // of_token, rows, columns_apart


def _descriptor(x, shape, strides, block):
    dtype = gl.float32 if x.dtype == torch.float32 else gl.bfloat16
    return TensorDescriptor(x, list(shape), list(strides), block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@functools.lru_cache(maxsize=None)
def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(maxsize=None)
def _exponent_scale(scale):
    """fp32 ``scale`` times log2(e), rounded once."""
    return float(torch.tensor(scale, dtype=torch.float32).double() * _LOG2E)


def settings(pairs, K, repeat, processors):
    """(programs that share out the tiles of scores of a pair of sequence and key head, channels of a slice, stages of its chain)"""
    columns = next((n for n in (16, 32) if pairs * (K // n) <= processors), 64)
    stage = BLOCK[K] * (2 * columns + 4 * (32 if repeat <= 8 else 64))
    return max(1, _RESIDENT[K] * processors // pairs), columns, min(6, _SHARED // stage)


def attend(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale):
    """(out [T, H, K] bf16, log-sum-exp [H, T] fp32) of sequences of at most one new token each that this form `serves`; see :func:`fa3.attend`."""
    (T, H, K), (_, page, G, _), B = q.shape, key_cache.shape, block_table.shape[0]
    repeat, bound = H // G, triton.cdiv(block_table.shape[1] * page, _WHOLE[K]) * _WHOLE[K]
    parts, columns, stages = settings(B * G, K, repeat, _processors(q.device))
    scores = torch.empty(B * G * repeat, bound, dtype=torch.float32, device=q.device)
    out, lse = torch.empty(T, H, K, dtype=q.dtype, device=q.device), torch.empty(H, T, dtype=torch.float32, device=q.device)
    lengths = block_table, seq_lens, query_start_loc
    pages = block_table.stride(0), page, -(-(2**34) // page)
    scores_kernel[parts, B * G](
        q, key_cache, scores, *lengths, *q.stride()[:2], *key_cache.stride()[:3], *pages, bound, G, repeat, K,
        power_of_two(K), _SCORE_STAGES, num_warps=4, **COMPILE,
    )  # fmt: skip
    wide, narrow = (_descriptor(scores, scores.shape, scores.stride(), [8, n]) for n in (32, min(BLOCK[K] - 64, 32)))
    values, *steps = _rows(value_cache, columns)
    chain_kernel[K // columns, B * G](
        wide, narrow, values, out, lse, *lengths, _exponent_scale(scale), T, *steps, *pages, G, repeat,
        32 if repeat <= 8 else 64, K, columns, BLOCK[K] - 64, stages, num_warps=4, maxnreg=_REGISTERS, **COMPILE,
    )  # fmt: skip
    return out, lse
