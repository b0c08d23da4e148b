"""Collectives over a process group. They move bytes; every sum is the balanced tree over ranks, taken by each rank alone."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isoexec.contract import ContractError
from isoexec.ops._core.rowsum import tree_sum


def group_size(tp) -> int:
    """Ranks of ``tp``; 1 when None."""
    return 1 if tp is None else dist.get_world_size(tp.group)


def all_gather(x: torch.Tensor, group) -> torch.Tensor:
    """``x`` of every rank, stacked in rank order: [n, *x.shape]. Travels as bytes, so that no transport converts it."""
    x = x.contiguous()
    n = dist.get_world_size(group)
    if n == 1 or not x.numel():
        return x.expand(n, *x.shape)
    out = torch.empty(n, *x.shape, dtype=x.dtype, device=x.device)
    dist.all_gather(list(out.view(n, -1).view(torch.uint8).unbind()), x.view(-1).view(torch.uint8), group=group)
    return out


def sum_over_ranks(partial: torch.Tensor, group) -> torch.Tensor:
    """Tree over ranks of one fp32 partial each: the upper levels of the tree whose aligned subtrees the ranks reduced."""
    n = dist.get_world_size(group)
    if n & (n - 1):
        raise ContractError(f"tensor-parallel degree {n} is not a power of two: a rank would own no aligned subtree; choose 1, 2, 4, ...")
    return tree_sum(all_gather(partial, group))


def own_rows(x: torch.Tensor, group) -> torch.Tensor:
    """This rank's equal share of the first dimension."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if x.shape[0] % n:
        raise ContractError(f"sequence parallel: {x.shape[0]} tokens do not divide over {n} ranks; pad the packed batch")
    share = x.shape[0] // n
    return x[rank * share : (rank + 1) * share]


class _ColumnParallelInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tp):
        ctx.tp = tp
        return all_gather(x, tp.group).flatten(0, 1) if tp.sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = sum_over_ranks(grad.float(), ctx.tp.group)
        if ctx.tp.sequence_parallel:
            total = own_rows(total, ctx.tp.group)
        return total.to(grad.dtype), None


def column_parallel_input(x, *, tp=None):
    return x if group_size(tp) == 1 else _ColumnParallelInput.apply(x, tp)


class _RowsOfOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, owner, tp):
        ctx.tp = tp
        ctx.save_for_backward(owner)
        # One gather of T rows per rank: an all-to-all would move less, and matters once D * T does.
        chosen = all_gather(rows, tp.group)[owner, torch.arange(len(owner), device=rows.device)]
        return own_rows(chosen, tp.group) if tp.sequence_parallel else chosen

    @staticmethod
    def backward(ctx, grad):
        (owner,) = ctx.saved_tensors
        if ctx.tp.sequence_parallel:
            grad = all_gather(grad, ctx.tp.group).flatten(0, 1)
        return torch.where((owner == dist.get_rank(ctx.tp.group)).unsqueeze(1), grad, 0), None, None


def rows_of_owners(rows, owner, *, tp):
    return _RowsOfOwners.apply(rows, owner, tp)
