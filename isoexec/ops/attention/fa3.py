"""Causal attention by FlashAttention 3 (sm_90), one KV split in every case: its own fixed order, proven per head size by tests/gpu.

Only the compiled extension is loaded, from the pinned provider. Row bits are the same packed, paged, chunked and in decode for the head sizes
named here. Pages are read whole and stale rows multiplied by zero, so a cache must hold finite values only. Other head sizes (64: a batch of single tokens takes another tile) go to the Triton form.
"""

from __future__ import annotations

import functools

import torch

from isoexec.contract import ContractError
from isoexec.ops._core.provider import provided

HEAD_SIZES = (128, 192, 256)
#: Cache pages whose gate has passed, for every head size; it reads pages by another engine where its step of keys divides them.
PAGE_SIZES = range(16, 2049, 16)


@functools.lru_cache(maxsize=None)
def _forward():
    (path,) = provided("flash_attention_3").glob("*.so")
    torch.ops.load_library(path)
    return torch.ops._vllm_fa3_C.fwd


def attend(q, k, v, cu_seqlens_q, scale, *, longest_q, longest_k, cu_seqlens_k=None, seq_lens=None, block_table=None, splits=1):
    """(out [T, H, K] bf16, log-sum-exp [H, T] fp32); ``longest_*`` bound the lengths from above, and move no bit.

    Args:
        splits: 1 in every op; benchmarks pass the provider's default, 0, whose bits depend on the batch.
        q: [T, H, K] bf16. k, v: [T, G, K] packed with ``cu_seqlens_k``, or [pages, page_size, G, K] with ``seq_lens`` and ``block_table``.
    """
    if block_table is not None and k.shape[1] not in PAGE_SIZES:
        raise ContractError(
            f"op attention.paged: pages of {k.shape[1]} tokens with head size {q.shape[2]}: expected a multiple of "
            f"{PAGE_SIZES.step} up to {PAGE_SIZES[-1]}, which passed the gate of FlashAttention 3; set the engine's block_size to one"
        )
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse, *_ = _forward()(
        q, k, v,
        None, None, None,  # new keys and values, q for v
        None,  # out
        cu_seqlens_q, cu_seqlens_k,
        None, None,  # new keys' cu_seqlens, used lengths of q
        seq_lens, longest_q, longest_k, block_table,
        None, None, None, None, None,  # batch index, left padding, rotary cos, sin and lengths
        None, None, None,  # descaling
        scale, True,
        -1, -1, 0.0,  # no window, no soft cap
        True, None,
        splits,
        None, 0,  # pack_gqa by shape, no SMs kept free
        None, 1, 0, None,  # no sinks, no context parallelism
    )  # fmt: skip
    return out, lse
