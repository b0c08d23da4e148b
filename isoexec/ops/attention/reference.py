"""Causal attention of the CPU backend. Packed and paged attention are one function: a packed batch is a cache whose pages hold one token.

The query rows of one key head (token-major, then query head) are cut into tiles of 16. Every product has one shape, [16, K] x [K, kv_block] and
[16, kv_block] x [kv_block, K], batched over tiles, key heads and KV blocks, so a row's bits do not depend on what is computed beside it.
Elementwise steps and row sums run over all KV blocks at once; the recurrence over blocks is what stays sequential.
"""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops._core import math
from isoexec.ops._core.rowsum import row_sum
from isoexec.ops.attention.backward import attention_grad

ROWS = 16
_PASS_ELEMENTS = 1 << 19  # scores per pass; bounds memory, moves no bit


def _tiles(query_start_loc, seq_lens, repeat, kv_block):
    """Tiles of the batch, those with most KV blocks first: sequence [n], token (row of q), query head and position [n, ROWS] (position -1: padding
    row), KV blocks to visit [n]."""
    start, length = query_start_loc[:-1].long(), seq_lens.long()
    new = query_start_loc[1:].long() - start
    count = (new * repeat + ROWS - 1).div(ROWS, rounding_mode="floor")
    sequence = torch.repeat_interleave(torch.arange(len(count)), count)
    tile = torch.arange(len(sequence)) - (count.cumsum(0) - count)[sequence]
    row = tile[:, None] * ROWS + torch.arange(ROWS)
    token, head = row.div(repeat, rounding_mode="floor"), row % repeat
    real = token < new[sequence, None]
    position = torch.where(real, (length - new)[sequence, None] + token, -1)
    token = torch.where(real, start[sequence, None] + token, 0)
    blocks = position.amax(1).div(kv_block, rounding_mode="floor") + 1
    order = torch.argsort(blocks, descending=True, stable=True)
    return [x[order] for x in (sequence, token, head, position, blocks)]


def _gather(cache, page_ids, length, keys):
    """The first ``keys`` keys or values of each tile's sequence, as fp32 [n, G, keys, K]. Beyond ``length`` [n] there is +0.0, by selection: the
    memory may hold anything, NaN included."""
    heads_first = cache.stride(2) > cache.stride(1)  # vLLM's CPU cache: follow memory, so that a page is copied in long runs
    packed = cache.transpose(1, 2) if heads_first else cache
    rows = packed.index_select(0, page_ids.flatten()).unflatten(0, page_ids.shape)
    rows = rows.transpose(1, 2) if heads_first else rows.permute(0, 3, 1, 2, 4)
    out = rows.to(torch.float32, memory_format=torch.contiguous_format).flatten(2, 3)[:, :, :keys]
    shortest = int(length.min())
    absent = torch.arange(shortest, keys) >= length[:, None]
    out[:, :, shortest:].masked_fill_(absent[:, None, :, None], 0.0)
    return out


def _softmax_blocks(scores, position, kv_block):
    """Everything of the online softmax that is not sequential: [n, G, B, R, kv_block] -> P, its row sums, alpha, seen ([n, G, B, R])."""
    blocks = scores.shape[2]
    key = torch.arange(blocks * kv_block).view(blocks, 1, kv_block)
    scores = torch.where(key <= position[:, None, None, :, None], scores, -torch.inf)
    maximum = scores.amax(-1).cummax(2).values
    before = torch.cat([torch.full_like(maximum[:, :, :1], -torch.inf), maximum[:, :, :-1]], 2)
    p = math.exp(scores - maximum.unsqueeze(-1))
    seen = key[:, :, 0] <= position[:, None, None, :]
    return p, row_sum(p), math.exp(before - maximum), seen, maximum[:, :, -1]


def _attend(q_RK, position, keys, values, scale, kv_block):
    """Tiles q [n, G, ROWS, K] against KV [n, G, S, K] -> (out [n, G, used, K] fp32 before rounding, log-sum-exp), used <= ROWS."""
    n, G, _, K = q_RK.shape
    blocks = keys.shape[2] // kv_block
    used = int((position >= 0).sum(1).max())  # decode fills few rows of a tile: the products take them all, the exponentials do not
    q = q_RK.unsqueeze(2).expand(n, G, blocks, ROWS, K).reshape(-1, ROWS, K)
    scores = torch.bmm(q, keys.reshape(-1, kv_block, K).mT).view(n, G, blocks, ROWS, kv_block)[..., :used, :] * scale
    p, sums, alpha, seen, maximum = _softmax_blocks(scores, position[:, :used], kv_block)
    p = torch.nn.functional.pad(p.to(torch.bfloat16).float(), (0, 0, 0, ROWS - used))
    pv = torch.bmm(p.view(-1, ROWS, kv_block), values.reshape(-1, kv_block, K)).view(n, G, blocks, ROWS, K)[..., :used, :]
    total = torch.zeros_like(sums[:, :, 0])
    out = torch.zeros_like(pv[:, :, 0])
    for j in range(blocks):
        # A block with no visible key leaves the row as it is, by selection: x * 1 + 0 would turn -0.0 into +0.0.
        total = torch.where(seen[:, :, j], total * alpha[:, :, j] + sums[:, :, j], total)
        step = out * alpha[:, :, j, :, None] + pv[:, :, j]
        out = torch.where(seen[:, :, j, :, None], step, out)
    return out / total.unsqueeze(-1), maximum + math.log(total)


def _forward(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, scale, kv_block):
    """(out [T, H, K], log-sum-exp [T, H] fp32); arguments as of :func:`isoexec.ops.attention.paged`."""
    T, H, K = q.shape
    page_size, G = key_cache.shape[1:3]
    q_TGRK = q.unflatten(1, (G, H // G))
    out, lse = torch.zeros_like(q_TGRK), q.new_zeros(T, G, H // G, dtype=torch.float32)
    plan = _tiles(query_start_loc, seq_lens, H // G, kv_block)
    first = 0
    while first < len(plan[0]):
        keys = int(plan[4][first]) * kv_block
        last = first + max(_PASS_ELEMENTS // (keys * ROWS * G), 1)
        sequence, token, head, position, _ = (x[first:last] for x in plan)
        length = seq_lens[sequence].long().clamp_(max=keys)
        page = torch.arange(-(-keys // page_size))
        ids = block_table[sequence[:, None], page.clamp(max=block_table.shape[1] - 1)].long()
        ids = torch.where(page * page_size < length[:, None], ids, 0)
        k, v = (_gather(cache, ids, length, keys) for cache in (key_cache, value_cache))
        o, l = _attend(q_TGRK[token, :, head].transpose(1, 2).float(), position, k, v, scale, kv_block)
        real = position[:, : o.shape[2]] >= 0
        where = token[:, : o.shape[2]][real], slice(None), head[:, : o.shape[2]][real]
        out[where] = o.transpose(1, 2)[real].to(q.dtype)
        lse[where] = l.transpose(1, 2)[real]
        first = last
    return out.view(T, H, K), lse.view(T, H)


def _check_packing(cu_seqlens, tokens: int) -> None:
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or sorted(bounds) != bounds:
        raise ContractError(f"op attention.varlen: cu_seqlens: expected entries ascending from 0 to the {tokens} tokens, found {bounds}")


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale, kv_block):
        _check_packing(cu_seqlens, len(q))
        start, stop = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        longest = int((stop - start).max()) if len(start) else 0
        tokens = start[:, None] + torch.arange(max(longest, 1))
        cache = (x.contiguous().unsqueeze(1) for x in (k, v))
        out, lse = _forward(q, *cache, tokens, stop - start, cu_seqlens, scale, kv_block)
        ctx.save_for_backward(q, k, v, cu_seqlens, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        return *attention_grad(grad, *ctx.saved_tensors, ctx.scale), None, None, None


def varlen(q, k, v, cu_seqlens, *, scale, kv_block, longest=None):
    return _Varlen.apply(q, k, v, cu_seqlens, float(scale), kv_block)


def _check_pages(block_table, seq_lens, page_size: int) -> None:
    room, longest = block_table.shape[1] * page_size, int(seq_lens.max()) if len(seq_lens) else 0
    if longest > room:
        raise ContractError(
            f"op attention.paged: seq_lens: expected at most the {room} tokens that a row of block_table has pages for, found {longest}; "
            "pass the whole table"
        )


def paged(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, *, scale, kv_block, longest=None):
    _check_pages(block_table, seq_lens, key_cache.shape[1])
    return _forward(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, float(scale), kv_block)[0]


def write_cache(k, v, key_cache, value_cache, slot_mapping):
    page_size = key_cache.shape[1]
    k, v = k[: len(slot_mapping)], v[: len(slot_mapping)]
    stored = slot_mapping >= 0
    if not stored.all():
        k, v, slot_mapping = k[stored], v[stored], slot_mapping[stored]
    page = slot_mapping.div(page_size, rounding_mode="floor")
    offset = slot_mapping - page * page_size
    key_cache[page, offset] = k
    value_cache[page, offset] = v
