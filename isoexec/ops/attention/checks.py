"""What every implementation of attention refuses."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops._core.expect import BF16, tensor

_INT32 = (torch.int32,)  # the kernels read these by address


def check_varlen(q, k, v, cu_seqlens, *, scale, kv_block, longest=None) -> None:
    """Raises ContractError unless q is [T, H, K], k and v [T, G, K], bf16, cu_seqlens [B + 1] int32, and G divides H."""
    op = "attention.varlen"
    tensor(op, "q", q, BF16, "T", "H", "K")
    tensor(op, "k", k, BF16, q.shape[0], "G", q.shape[2])
    tensor(op, "v", v, BF16, *k.shape)
    tensor(op, "cu_seqlens", cu_seqlens, _INT32, "B + 1")
    _check_heads(op, q, k.shape[1])


def check_paged(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, *, scale, kv_block, longest=None) -> None:
    """Raises ContractError unless q is [T, H, K], the caches [pages, page_size, G, K], bf16, G divides H, and block_table
    [B, max_pages], seq_lens [B] and query_start_loc [B + 1] are int32, a row's entries beside each other."""
    op = "attention.paged"
    tensor(op, "q", q, BF16, "T", "H", "K")
    tensor(op, "key_cache", key_cache, BF16, "pages", "page_size", "G", q.shape[2])
    tensor(op, "value_cache", value_cache, BF16, *key_cache.shape)
    tensor(op, "block_table", block_table, _INT32, "B", "max_pages")
    tensor(op, "seq_lens", seq_lens, _INT32, block_table.shape[0])
    tensor(op, "query_start_loc", query_start_loc, _INT32, block_table.shape[0] + 1)
    _check_heads(op, q, key_cache.shape[2])
    for name, x in (("block_table", block_table), ("seq_lens", seq_lens), ("query_start_loc", query_start_loc)):
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            found = list(x.stride())
            raise ContractError(f"op {op}: {name}: expected entries beside each other, found strides {found}; pass it contiguous")


def check_write_cache(k, v, key_cache, value_cache, slot_mapping) -> None:
    """Raises ContractError unless k and v are [T, G, K], the caches [pages, page_size, G, K], bf16, and slot_mapping is [T] int64."""
    op = "attention.write_cache"
    tensor(op, "k", k, BF16, "T", "G", "K")
    tensor(op, "v", v, (k.dtype,), *k.shape)
    tensor(op, "key_cache", key_cache, (k.dtype,), "pages", "page_size", *k.shape[1:])
    tensor(op, "value_cache", value_cache, (k.dtype,), *key_cache.shape)
    tensor(op, "slot_mapping", slot_mapping, (torch.int64,), k.shape[0])


def _check_heads(op: str, q, groups: int) -> None:
    if not groups or q.shape[1] % groups:
        raise ContractError(f"op {op}: {groups} key heads do not divide {q.shape[1]} query heads; check the model's config and its shards")
