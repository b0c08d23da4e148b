"""Portable causal attention in Triton: online softmax over blocks of ``kv_block`` keys from position 0, packed and paged in one kernel.

A tile holds 64 query rows of one key head (token-major, then query head) in every case, so that a row runs the same instructions wherever it
lies; what is masked is selected away, so a row's bits depend on its own sequence alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.contract import ContractError
from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE, dot, dot_add

ROWS = 64
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def forward_kernel(q, keys, values, out, lse, cu_seqlens, seq_lens, block_table, scale, T, q_token, q_head, k_page, k_token, k_head,
                   v_page, v_token, v_head, table_row, page_size, G: tl.constexpr, REPEAT: tl.constexpr, K: tl.constexpr,
                   N: tl.constexpr, ROWS: tl.constexpr, KV: tl.constexpr, PAGED: tl.constexpr):  # fmt: skip
    """Program (tile, key head, sequence). Not ``PAGED``: the keys of sequence b are rows cu_seqlens[b] and on."""
    b = tl.program_id(2)
    start = tl.load(cu_seqlens + b)
    new = tl.load(cu_seqlens + b + 1) - start
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < new * REPEAT:
        g = tl.program_id(1)
        length = new
        if PAGED:
            length = tl.load(seq_lens + b)
        real = row < new * REPEAT
        local = row // REPEAT
        head = g * REPEAT + row % REPEAT
        position = tl.where(real, length - new + local, -1)
        token = (start + local).to(tl.int64)
        d = tl.arange(0, N)
        j = tl.arange(0, KV)
        q_tile = tl.load(q + (token * q_token + head * q_head)[:, None] + d[None, :], mask=real[:, None] & (d < K)[None, :], other=0.0)
        m = tl.full([ROWS], _LOWEST, dtype=tl.float32)
        total = tl.zeros([ROWS], dtype=tl.float32)
        acc = tl.zeros([ROWS, N], dtype=tl.float32)
        stop = tl.max(position, 0) + 1
        for first in range(0, stop, KV):
            key = first + j
            there = key < length
            if PAGED:
                page = tl.load(block_table + b * table_row + key // page_size, mask=there, other=0).to(tl.int64)
                k_at = page * k_page + (key % page_size).to(tl.int64) * k_token
                v_at = page * v_page + (key % page_size).to(tl.int64) * v_token
            else:
                k_at = (start + key).to(tl.int64) * k_token
                v_at = (start + key).to(tl.int64) * v_token
            mask = there[:, None] & (d < K)[None, :]
            k_tile = tl.load(keys + (k_at + g * k_head)[:, None] + d[None, :], mask=mask, other=0.0)
            s = dot(q_tile, tl.trans(k_tile)) * scale
            s = tl.where(key[None, :] <= position[:, None], s, _LOWEST)
            seen = first <= position  # a block with no visible key leaves the row as it is
            peak = tl.maximum(m, tl.max(s, 1))
            # Rows that saw nothing keep -inf: their exponents are taken against 0 to keep NaN out.
            base = tl.where(seen, peak, 0.0)
            p = tl.exp(s - base[:, None])
            alpha = tl.exp(tl.where(seen, m, _LOWEST) - base)
            total = tl.where(seen, total * alpha + tl.sum(p, 1), total)
            v_tile = tl.load(values + (v_at + g * v_head)[:, None] + d[None, :], mask=mask, other=0.0)
            acc = tl.where(seen[:, None], dot_add(p.to(tl.bfloat16), v_tile, acc * tl.where(seen, alpha, 1.0)[:, None]), acc)
            m = tl.where(seen, peak, m)
        at = (token * (G * REPEAT) + head) * K
        o = tl.div_rn(acc, tl.where(real, total, 1.0)[:, None] + tl.zeros([ROWS, N], dtype=tl.float32))
        tl.store(out + at[:, None] + d[None, :], o.to(out.dtype.element_ty), mask=real[:, None] & (d < K)[None, :])
        tl.store(lse + head.to(tl.int64) * T + token, m + tl.log(total), mask=real)


def attend(q, k, v, cu_seqlens, scale, kv_block, *, longest_q, seq_lens=None, block_table=None):
    """(out [T, H, K] bf16, log-sum-exp [H, T] fp32). k, v: [T, G, K] packed, or [pages, page_size, G, K] with the other two."""
    paged = block_table is not None
    T, H, K = q.shape
    G = k.shape[-2]
    if H % G or kv_block < 16:
        raise ContractError(f"attention: {G} key heads for {H} query heads, blocks of {kv_block} keys; expected a divisor, and at least 16")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = torch.empty(T, H, K, dtype=q.dtype, device=q.device), torch.empty(H, T, dtype=torch.float32, device=q.device)
    pages = [(0, *x.stride()[:2]) if not paged else x.stride()[:3] for x in (k, v)]
    grid = triton.cdiv(longest_q * (H // G), ROWS), G, cu_seqlens.shape[0] - 1
    if T and grid[2]:
        forward_kernel[grid](
            q, k, v, out, lse, cu_seqlens, seq_lens if paged else cu_seqlens, block_table if paged else cu_seqlens, scale, T, *q.stride()[:2],
            *pages[0], *pages[1], block_table.stride(0) if paged else 0, k.shape[1] if paged else 1, G, H // G, K, power_of_two(K), ROWS,
            kv_block, paged, num_warps=4, num_stages=2 if K <= 128 else 1, **COMPILE,
        )  # fmt: skip
    return out, lse


@triton.jit
def store_kernel(k, v, key_cache, value_cache, slots, k_token, k_head, v_token, v_head, kc_page, kc_token, kc_head, vc_page, vc_token,
                 vc_head, page_size, G: tl.constexpr, K: tl.constexpr, N: tl.constexpr):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        token = tl.program_id(0).to(tl.int64)
        d = tl.arange(0, N)
        page = slot // page_size
        offset = slot - page * page_size
        for g in range(G):
            kept = tl.load(k + token * k_token + g * k_head + d, mask=d < K)
            tl.store(key_cache + page * kc_page + offset * kc_token + g * kc_head + d, kept, mask=d < K)
            kept = tl.load(v + token * v_token + g * v_head + d, mask=d < K)
            tl.store(value_cache + page * vc_page + offset * vc_token + g * vc_head + d, kept, mask=d < K)


def write_cache(k, v, key_cache, value_cache, slot_mapping):
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    if key_cache.stride(-1) != 1 or value_cache.stride(-1) != 1:
        raise ContractError(f"attention.write_cache: the cache's last dimension must be contiguous, its strides are {key_cache.stride()}")
    G, K = k.shape[1:]
    if len(slot_mapping):
        store_kernel[len(slot_mapping),](
            k, v, key_cache, value_cache, slot_mapping, *k.stride()[:2], *v.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
            key_cache.shape[1], G, K, power_of_two(K), num_warps=1,
        )  # fmt: skip
