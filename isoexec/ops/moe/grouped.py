"""Grouped expert MLP: pairs sorted by expert, one product per expert that has rows."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isoexec.ops import activation
from isoexec.ops.matmul.reference import product


class _Gather(torch.autograd.Function):
    """Rows x[token[r]] [R, D]; the gradient of a token sums its pairs in rank order, in fp32: no scatter-add."""

    @staticmethod
    def forward(ctx, x, token, place):
        ctx.save_for_backward(place)
        return x[token]

    @staticmethod
    def backward(ctx, grad):
        (place,) = ctx.saved_tensors
        own = spread(grad, place)
        total = own[:, 0].float()
        for r in range(1, own.shape[1]):
            total = total + own[:, r].float()
        return total.to(grad.dtype), None, None


class _Spread(torch.autograd.Function):
    """Rows [R, D] back to pairs [T, k, D]; +0.0 where ``place`` is -1."""

    @staticmethod
    def forward(ctx, rows, place, pair):
        ctx.save_for_backward(pair)
        return spread(rows, place)

    @staticmethod
    def backward(ctx, grad):
        (pair,) = ctx.saved_tensors
        return grad.flatten(0, 1)[pair], None, None


def spread(rows, place):
    out = rows.new_zeros(*place.shape, rows.shape[-1])
    held = place >= 0
    out[held] = rows[place[held]]
    return out


class _GroupedLinear(torch.autograd.Function):
    """rows [R, K] sorted by expert, ``counts`` rows each; weights one [E', N, K] or E' times [N, K] -> [R, N] bf16."""

    @staticmethod
    def forward(ctx, rows, counts, *weights):
        ctx.counts, ctx.stacked = counts, len(weights) == 1 and weights[0].dim() == 3
        ctx.save_for_backward(rows, *weights)
        each = weights[0] if ctx.stacked else weights
        out = rows.new_empty(rows.shape[0], each[0].shape[0])
        for e, at in _segments(counts):
            out[at] = product(rows[at], each[e]).to(torch.bfloat16)
        return out

    @staticmethod
    def backward(ctx, grad):
        rows, *weights = ctx.saved_tensors
        each = weights[0] if ctx.stacked else weights
        grad_rows = torch.empty_like(rows)
        grad_weights = [torch.zeros_like(w) for w in weights]  # an expert without tokens has a gradient of zeros, not none
        for e, at in _segments(ctx.counts):
            g = grad[at].float()
            grad_rows[at] = (g @ each[e].float()).to(rows.dtype)
            (grad_weights[0] if ctx.stacked else grad_weights)[e].copy_(g.T @ rows[at].float())
        return grad_rows, None, *grad_weights


def _segments(counts):
    start = 0
    for e, n in enumerate(counts):
        if n:
            yield e, slice(start, start + n)
        start += n


def expert_mlp(x, experts, gate_up, down, *, ep=None):
    held = len(gate_up)
    local = experts.flatten() - (0 if ep is None else held * dist.get_rank(ep.group))
    local = torch.where((local >= 0) & (local < held), local, held)
    counts = local.bincount(minlength=held + 1)[:held].tolist()
    pair = local.argsort(stable=True)[: sum(counts)]  # pairs of held experts, by expert, then by token
    place = torch.full_like(local, -1)
    place[pair] = torch.arange(len(pair), device=x.device)
    place = place.view(experts.shape)
    rows = _Gather.apply(x, pair.div(experts.shape[1], rounding_mode="floor"), place)
    h = activation.silu_mul(_GroupedLinear.apply(rows, counts, *_each(gate_up)))
    return _Spread.apply(_GroupedLinear.apply(h, counts, *_each(down)), place, pair)


def _each(weights):
    return (weights,) if isinstance(weights, torch.Tensor) else tuple(weights)
