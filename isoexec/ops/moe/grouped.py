"""Grouped expert MLP: pairs sorted by expert, one fixed-shape tile product per expert that has rows."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from isoexec.ops import activation
from isoexec.ops.matmul.reference import COLUMNS, ROWS, batched, product

# fp32 weights that one batched product may hold; above it an expert's product is large enough to be called alone.
_BATCHED_ELEMENTS = 1 << 22


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
        return grouped_product(rows, counts, weights[0] if ctx.stacked else weights).to(torch.bfloat16)

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


def grouped_product(rows, counts, weights):
    """One leaf per expert: rows [R, K] sorted by expert -> [R, N] fp32. Small experts share a batched product of the same tiles, so that a
    decode step does not pay a call per expert; a tile's bits are its own either way."""
    (R, K), N = rows.shape, weights[0].shape[0]
    tiles = [-(-n // ROWS) for n in counts]
    if not R or K == 1 or sum(tiles) * N * K > _BATCHED_ELEMENTS:
        out = rows.new_empty(R, N, dtype=torch.float32)
        for e, at in _segments(counts):
            out[at] = product(rows[at], weights[e])
        return out
    owner = [e for e, n in enumerate(tiles) for _ in range(n)]
    w = weights[owner] if isinstance(weights, torch.Tensor) else torch.stack([weights[e] for e in owner])
    w = pad(w.float(), (0, 0, 0, -N % COLUMNS)).view(-1, COLUMNS, K)
    columns = -(-N // COLUMNS)
    first_tile, first_row = (torch.tensor(list(accumulate(x, initial=0))[:-1]) for x in (tiles, counts))
    at = torch.arange(R) + (first_tile * ROWS - first_row).repeat_interleave(torch.tensor(counts))
    x = rows.new_zeros(len(owner) * ROWS, K, dtype=torch.float32)
    x[at] = rows.float()
    y = batched(x.view(-1, 1, ROWS, K).expand(-1, columns, ROWS, K).reshape(-1, ROWS, K), w.mT)
    return y.view(-1, columns, ROWS, COLUMNS).transpose(1, 2).reshape(-1, columns * COLUMNS)[at, :N]


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
