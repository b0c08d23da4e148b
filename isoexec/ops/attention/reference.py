"""Causal attention of the CPU backend. Packed and paged attention are one function: a packed batch is a cache of one page.

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


def _gather(cache, page, offset, exists):
    """Keys or values [n, S] of the cache as fp32 [n, G, S, K]; what does not exist is +0.0 by selection, whatever the memory holds."""
    heads = torch.arange(cache.shape[2])[:, None]
    rows = cache[page[:, None], offset[:, None], heads]
    return torch.where(exists[:, None, :, None], rows, 0.0).float()


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


def _forward(q, key_cache, value_cache, locate, seq_lens, query_start_loc, scale, kv_block):
    """(out [T, H, K], log-sum-exp [T, H] fp32). ``locate(sequence [n, 1], position [S])`` gives page and offset, each [n, S]."""
    T, H, K = q.shape
    G = key_cache.shape[2]
    if H % G:
        raise ContractError(f"attention: {G} key heads do not divide {H} query heads")
    repeat = H // G
    q_TGRK = q.unflatten(1, (G, repeat))
    out, lse = torch.zeros_like(q_TGRK), q.new_zeros(T, G, repeat, dtype=torch.float32)
    plan = _tiles(query_start_loc, seq_lens, repeat, kv_block)
    lengths, first = seq_lens.long(), 0
    while first < len(plan[0]):
        blocks = int(plan[4][first])
        last = first + max(_PASS_ELEMENTS // (blocks * kv_block * ROWS * G), 1)
        sequence, token, head, position, _ = (x[first:last] for x in plan)
        key = torch.arange(blocks * kv_block)
        exists = key < lengths[sequence, None]
        page, offset = locate(sequence[:, None], torch.where(exists, key, 0))
        keys, values = (_gather(cache, page, offset, exists) for cache in (key_cache, value_cache))
        tiles = q_TGRK[token, :, head].transpose(1, 2).float()
        o, l = _attend(tiles, position, keys, values, scale, kv_block)
        real = position[:, : o.shape[2]] >= 0
        where = token[:, : o.shape[2]][real], slice(None), head[:, : o.shape[2]][real]
        out[where] = o.transpose(1, 2)[real].to(q.dtype)
        lse[where] = l.transpose(1, 2)[real]
        first = last
    return out.view(T, H, K), lse.view(T, H)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale, kv_block):
        start = cu_seqlens[:-1].long()

        def locate(sequence, position):
            return torch.zeros_like(position), start[sequence] + position

        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        out, lse = _forward(q, k[None], v[None], locate, lengths, cu_seqlens, scale, kv_block)
        ctx.save_for_backward(q, k, v, cu_seqlens, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad):
        return *attention_grad(grad, *ctx.saved_tensors, ctx.scale), None, None, None


def varlen(q, k, v, cu_seqlens, *, scale, kv_block):
    return _Varlen.apply(q, k, v, cu_seqlens, float(scale), kv_block)


def paged(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, *, scale, kv_block):
    page_size = key_cache.shape[1]

    def locate(sequence, position):
        page = position.div(page_size, rounding_mode="floor")
        return block_table[sequence, page].long(), position - page * page_size

    return _forward(q, key_cache, value_cache, locate, seq_lens, query_start_loc, float(scale), kv_block)[0]


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
