"""Expert parallelism: who holds which experts, and the two exchanges. They move bytes; sums are taken by the tree over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isoexec.contract import ContractError
from isoexec.ops._core.rowsum import tree_sum
from isoexec.ops.collective.reference import all_gather, sum_over_ranks


def local_groups(num_experts, combine_groups, ep):
    """(first expert held, expert groups held) of this rank."""
    if num_experts % combine_groups:
        raise ContractError(
            f"op moe.combine: combine_groups {combine_groups} does not divide the {num_experts} experts; build the contract with "
            "numerics.combine_groups = isoexec.ops.moe.combine_groups_for(num_experts)"
        )
    if ep is None:
        return 0, combine_groups
    ranks, r = dist.get_world_size(ep.group), dist.get_rank(ep.group)
    if combine_groups % ranks:
        raise ContractError(
            f"op moe.combine: expert-parallel degree {ranks} does not divide combine_groups {combine_groups}: a rank would not own a "
            "subtree of the combine tree. Lower the degree, or rebuild the contract with more groups"
        )
    return r * num_experts // ranks, combine_groups // ranks


def gather_rows(x, ep, rows):
    """Rows of all ranks in rank order: [rows[r], ...] -> [sum(rows), ...]; ``rows`` holds every rank's count."""
    padded = torch.zeros(max(rows), *x.shape[1:], dtype=x.dtype, device=x.device)
    padded[: x.shape[0]] = x
    return torch.cat([part[:n] for part, n in zip(all_gather(padded, ep.group), rows)])


def sum_partials(partial, ep, rows):
    """Tree over ranks of fp32 ``partial`` [T', ...]; with sharded tokens of this rank's rows only, [rows[rank], ...]."""
    if ep is None:
        return partial
    if rows is None:
        return sum_over_ranks(partial, ep.group)
    own = rows[dist.get_rank(ep.group)]
    size = partial.element_size() * partial.shape[1:].numel()
    received = torch.empty(len(rows) * own, *partial.shape[1:], dtype=torch.float32, device=partial.device)
    dist.all_to_all_single(_bytes(received), _bytes(partial), [own * size] * len(rows), [n * size for n in rows], group=ep.group)
    return tree_sum(received.unflatten(0, (len(rows), own)))


def _bytes(x):
    return x.detach().contiguous().view(-1).view(torch.uint8)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, ep, rows):
        ctx.ep, ctx.rows = ep, rows
        if rows is None:
            return x.view_as(x), weights.view_as(weights)
        return gather_rows(x, ep, rows), gather_rows(weights, ep, rows)

    @staticmethod
    def backward(ctx, grad_x, grad_weights):
        own_x = sum_partials(grad_x.float(), ctx.ep, ctx.rows).to(grad_x.dtype)
        return own_x, sum_partials(grad_weights, ctx.ep, ctx.rows), None, None


def dispatch(x, weights, experts, *, ep=None):
    if ep is None:
        return x, weights, experts, None
    rows = None
    if not ep.replicated:
        own = torch.tensor([x.shape[0]], dtype=torch.int64, device=x.device)
        rows = tuple(int(n) for n in all_gather(own, ep.group))
        experts = gather_rows(experts, ep, rows)
    return *_Dispatch.apply(x, weights, ep, rows), experts, rows
