"""Reductions with a shape: a sum's order depends on its length alone, never on layout, batch or vector width."""

from __future__ import annotations

import torch


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[-1]
        return _halve(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.unsqueeze(-1).expand(*grad.shape, ctx.length)


def row_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of fp32 ``x`` [..., N] over the last dimension -> [...], fp32.

    Pads with +0.0 to a power of two n, then halves: x[i] + x[i + n/2], until one is left (docs/schedule.md, row sums).
    """
    if x.dtype != torch.float32:
        raise TypeError(f"row_sum: expected torch.float32, found {x.dtype}")
    return _RowSum.apply(x)


def _halve(x: torch.Tensor) -> torch.Tensor:
    length = x.shape[-1]
    width = 1 << max(length - 1, 0).bit_length()
    if width != length:
        x = torch.nn.functional.pad(x, (0, width - length))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def tree_sum(leaves: torch.Tensor) -> torch.Tensor:
    """Balanced binary tree over the first dimension of fp32 ``leaves`` [G, ...] -> [...]; G a power of two.

    Neighbours are added first, so an aligned run of leaves is a subtree: a rank that owns one reduces it alone and
    exchanges one partial.
    """
    count = leaves.shape[0]
    if count & (count - 1) or not count:
        raise ValueError(f"tree_sum: expected a power of two of leaves, found {count}")
    while leaves.shape[0] > 1:
        leaves = leaves[0::2] + leaves[1::2]
    return leaves[0]
