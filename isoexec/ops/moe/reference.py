"""Router and combine of the CPU backend (docs/schedule.md, router and combine)."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops._core import math
from isoexec.ops._core.rowsum import row_sum, tree_sum
from isoexec.ops.matmul.reference import lm_head
from isoexec.ops.moe.parallel import gather_rows, local_groups, sum_partials

_TOKENS = 1024  # per tile of the combine, whose sums are E_G times the output


def router_logits(x, weight):
    return lm_head(x, weight)  # the same product: bf16 operands, fp32 accumulation, no rounding to bf16


def scores(logits, scoring):
    """[T, E] fp32 scores; differentiable."""
    if scoring == "sigmoid":
        return math.sigmoid(logits)
    # The maximum is exact and its gradient cancels, so it is a constant.
    e = math.exp(logits - logits.detach().amax(-1, keepdim=True))
    return e / row_sum(e).unsqueeze(-1)


def rank(key, top_k):
    """Indices [T, k] of the largest entries of ``key`` [T, E] in rank order: ties to the lowest index, NaN below every number."""
    key = torch.where(key.isnan(), -torch.inf, key)
    return key.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]


def in_best_groups(key, n_group, topk_group):
    """``key`` [T, E] with -inf for experts outside the ``topk_group`` best groups."""
    grouped = torch.where(key.isnan(), -torch.inf, key).unflatten(-1, (n_group, -1))
    best = grouped.sort(dim=-1, descending=True, stable=True).values
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, rank(best[..., 0] + best[..., 1], topk_group), True)
    return torch.where(kept.unsqueeze(-1), grouped, -torch.inf).flatten(1)


def route(logits, *, top_k, renormalize, scoring="softmax", expert_bias=None, scale=1.0, n_group=1, topk_group=1):
    score = scores(logits, scoring)
    with torch.no_grad():
        key = score if expert_bias is None else score + expert_bias
        experts = rank(key if n_group == 1 else in_best_groups(key, n_group, topk_group), top_k)
    weights = score.gather(-1, experts)
    if renormalize:
        total = weights[:, 0]
        for r in range(1, top_k):
            total = total + weights[:, r]
        weights = weights / (total + 1e-20 if scoring == "sigmoid" else total).unsqueeze(-1)
    if scale != 1.0:
        weights = weights * torch.tensor(scale, dtype=torch.float32)
    return weights, experts


def group_partials(values, weights, experts, first_expert, groups, experts_per_group):
    """Sums [G, T, D] fp32 of weight * value over each of ``groups`` expert groups, ascending expert index, from +0.0.

    A step adds one pair of every token, so no two additions of a step meet; a token's pairs are visited in the order of its experts.
    """
    ascending = experts.argsort(-1)
    experts, weights = experts.gather(-1, ascending), weights.gather(-1, ascending)
    group = (experts - first_expert).div(experts_per_group, rounding_mode="floor")
    T, k, D = values.shape
    sums = torch.zeros(groups, T, D, dtype=torch.float32, device=values.device)
    every = torch.arange(T, device=values.device)
    for r in range(k):
        own = every[(group[:, r] >= 0) & (group[:, r] < groups)]  # other ranks' pairs are left out, not multiplied by zero
        at = group[own, r], own
        term = values[own, ascending[own, r]].float() * weights[own, r, None]
        sums[at] = sums[at] + term
    return sums


def weighted_total(values, weights, experts, shared, first_expert, groups, experts_per_group, rows, ep):
    """The combine before its rounding, [T, D] fp32."""
    tiles = zip(*(x.split(_TOKENS) for x in (values, weights, experts)))  # rows are independent: only memory is at stake
    parts = [tree_sum(group_partials(*tile, first_expert, groups, experts_per_group)) for tile in tiles]
    total = sum_partials(torch.cat(parts), ep, rows)
    return total if shared is None else total + shared.float()


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, weights, experts, shared, first_expert, groups, experts_per_group, rows, ep):
        ctx.ep, ctx.rows = ep, rows
        ctx.save_for_backward(values, weights)
        return weighted_total(values, weights, experts, shared, first_expert, groups, experts_per_group, rows, ep).to(torch.bfloat16)

    @staticmethod
    def backward(ctx, grad):
        values, weights = ctx.saved_tensors
        every = (grad if ctx.rows is None else gather_rows(grad, ctx.ep, ctx.rows)).float().unsqueeze(1)
        # The value of a pair that is not held is +0.0, hence its weight's gradient too: ranks' gradients add up in dispatch's backward.
        grad_values = (every * weights.unsqueeze(-1)).to(values.dtype)
        grad_weights = row_sum(every * values.float())
        return grad_values, grad_weights, None, grad if ctx.needs_input_grad[3] else None, None, None, None, None, None


def combine(values, weights, experts, shared=None, *, num_experts, combine_groups, rows=None, ep=None):
    first_expert, groups = local_groups(num_experts, combine_groups, ep)
    if bool(((experts < 0) | (experts >= num_experts)).any()):
        raise ContractError(f"op moe.combine: experts: expected ids in 0..{num_experts - 1}, found {experts.min()} to {experts.max()}")
    return _Combine.apply(values, weights, experts, shared, first_expert, groups, num_experts // combine_groups, rows, ep)


def tokens_per_expert(experts, *, num_experts, valid=None):
    return (experts if valid is None else experts[valid]).flatten().bincount(minlength=num_experts)


def load_balancing_loss(logits, counts, *, total_tokens, top_k, coefficient, scoring="softmax", valid=None):
    if valid is not None:
        logits = logits[valid]
    score = scores(logits, scoring)
    if scoring == "sigmoid":
        score = score / (row_sum(score).unsqueeze(-1) + 1e-20)
    per_expert = row_sum(score.T) * counts.to(torch.float32)
    factor = logits.shape[-1] * coefficient / (top_k * total_tokens * total_tokens)
    return row_sum(per_expert) * torch.tensor(factor, dtype=torch.float32)


def update_expert_bias(expert_bias, counts, *, rate):
    lacking = torch.sign(counts.sum() - counts * counts.numel())
    return expert_bias + lacking.to(torch.float32) * torch.tensor(rate, dtype=torch.float32)
