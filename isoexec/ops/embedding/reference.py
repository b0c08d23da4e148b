"""Token embedding of the CPU backend."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx, grad):
        # A row that occurs often is summed in fp32, in token order, and rounded once.
        (ids,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return None, total.index_add_(0, ids, grad.float()).to(ctx.dtype)


def embedding(ids, weight):
    low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
    if ids.numel() and (low < 0 or high >= len(weight)):
        raise ContractError(f"op embedding.embedding: ids: expected 0 to {len(weight) - 1}, found {low} to {high}; check the tokenizer")
    return _Embedding.apply(ids, weight)
