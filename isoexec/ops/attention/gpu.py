"""Attention on a GPU. Architecture and head size pick the kernel, for every case alike: FlashAttention 3 on sm_90 where its bits are proven, the
Triton form elsewhere.

No split of the keys. One that is fixed in tokens would have to run in trainer, prefill and decode alike, hence in a kernel of ours, whose forward
takes 2.4 (head size 128) to 4.8 times (256) as long as FlashAttention 3's on 4 x 2048 packed tokens of an H200. What is split, in decode batches
too small to fill a GPU by sequences and key heads, is the execution of the one chain: see hopper_decode.py.
"""

from __future__ import annotations

import functools

import torch

from isoexec.ops.attention import fa3, hopper_decode
from isoexec.ops.attention import triton as portable
from isoexec.ops.attention import triton_backward
from isoexec.ops.attention.triton import write_cache

__all__ = ["paged", "varlen", "write_cache"]


@functools.lru_cache(maxsize=None)
def uses_fa3(device: torch.device, head_size: int) -> bool:
    return head_size in fa3.HEAD_SIZES and torch.cuda.get_device_capability(device) == (9, 0)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, scale, kv_block, longest):
        K = q.shape[2]
        if uses_fa3(q.device, K):
            out, lse = fa3.attend(q, k, v, cu_seqlens, scale, longest_q=longest, longest_k=longest, cu_seqlens_k=cu_seqlens)
        else:
            out, lse = portable.attend(q, k, v, cu_seqlens, scale, kv_block, longest_q=longest)
        ctx.save_for_backward(q, k, v, cu_seqlens, out, lse)
        ctx.scale, ctx.longest = scale, longest
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
        if q.shape[2] in triton_backward.TILES:
            return *triton_backward.gradients(grad, q, k, v, cu_seqlens, out, lse, ctx.scale, ctx.longest), None, None, None, None
        unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout state
        with _deterministic():
            grads = torch.ops.aten._flash_attention_backward(
                grad.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out, lse, cu_seqlens, cu_seqlens, ctx.longest, ctx.longest, 0.0, True,
                unused, unused[:0], scale=ctx.scale,
            )  # fmt: skip
        return *grads, None, None, None, None


class _deterministic:
    """torch's flash backward adds dq by atomics unless deterministic algorithms are asked for; they are, for this one call."""

    def __enter__(self):
        self.before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        self.fill = torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # the op writes every element; filling first costs a tenth

    def __exit__(self, *exc):
        torch.use_deterministic_algorithms(self.before[0], warn_only=self.before[1])
        torch.utils.deterministic.fill_uninitialized_memory = self.fill


def varlen(q, k, v, cu_seqlens, *, scale, kv_block, longest=None):
    if not q.shape[0]:
        return torch.zeros_like(q)
    # Without a bound the longest length is not read back from the device: the number of tokens bounds it, and a bound moves no bit.
    return _Varlen.apply(q, k, v, cu_seqlens, float(scale), kv_block, q.shape[0] if longest is None else longest)


def paged(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, *, scale, kv_block, longest=None):
    T, _, K = q.shape
    longest = T if longest is None else longest
    if not T:
        return torch.zeros_like(q)
    if uses_fa3(q.device, K):
        if longest == 1 and hopper_decode.serves(q, key_cache, value_cache, block_table):
            return hopper_decode.attend(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, float(scale))[0]
        longest_k = block_table.shape[1] * key_cache.shape[1]
        return fa3.attend(q, key_cache, value_cache, query_start_loc, float(scale), longest_q=longest, longest_k=longest_k, seq_lens=seq_lens,
                          block_table=block_table)[0]  # fmt: skip
    return portable.attend(q, key_cache, value_cache, query_start_loc, float(scale), kv_block, longest_q=longest, seq_lens=seq_lens,
                           block_table=block_table)[0]  # fmt: skip
