"""What every implementation of attention refuses."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops._core.expect import BF16, tensor


def check_varlen(q, k, v, cu_seqlens, *, scale, kv_block, longest=None) -> None:
    """Raises ContractError unless q is [T, H, K], k and v [T, G, K], bf16, and G divides H."""
    op = "attention.varlen"
    tensor(op, "q", q, BF16, "T", "H", "K")
    tensor(op, "k", k, BF16, q.shape[0], "G", q.shape[2])
    tensor(op, "v", v, BF16, *k.shape)
    _check_heads(op, q, k.shape[1])


def check_paged(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, *, scale, kv_block, longest=None) -> None:
    """Raises ContractError unless q is [T, H, K], the caches [pages, page_size, G, K], bf16, and G divides H."""
    op = "attention.paged"
    tensor(op, "q", q, BF16, "T", "H", "K")
    tensor(op, "key_cache", key_cache, BF16, "pages", "page_size", "G", q.shape[2])
    tensor(op, "value_cache", value_cache, BF16, *key_cache.shape)
    _check_heads(op, q, key_cache.shape[2])


def _check_heads(op: str, q, groups: int) -> None:
    if not groups or q.shape[1] % groups:
        raise ContractError(f"op {op}: {groups} key heads do not divide {q.shape[1]} query heads; check the model's config and its shards")
