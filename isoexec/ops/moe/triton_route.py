"""Router in Triton: one row per program, in registers; scores, choice and weights in one launch, their gradient in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE, column, row_sum, sigmoid

_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def _scores(logits, row, stride, E: tl.constexpr, N: tl.constexpr, LOGN: tl.constexpr, SIGMOID: tl.constexpr):
    """fp32 scores [1, N] of a row; +0.0 beyond E."""
    c = tl.arange(0, N)[None, :]
    x = tl.load(logits + row * stride + c, mask=c < E, other=_LOWEST)
    if SIGMOID:
        return tl.where(c < E, sigmoid(x), 0.0)
    else:
        # A maximum that skips NaN: the row's sum is NaN all the same, and with it every score.
        e = tl.where(c < E, tl.exp(x - tl.max(x, 1)[:, None]), 0.0)
        return tl.div_rn(e, row_sum(e, 1, N, LOGN) + tl.zeros([1, N], dtype=tl.float32))


@triton.jit
def _best(key, free, c, N: tl.constexpr):
    """(largest of ``key`` where ``free``, its lowest index) of a row [1, N]; there is one that is free."""
    peak = tl.max(tl.where(free, key, _LOWEST), 1)[:, None]
    return peak, tl.min(tl.where(free & (key == peak), c, N), 1)[:, None]


@triton.jit
def _in_best_groups(key, c, E: tl.constexpr, N: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, M: tl.constexpr):
    """``key`` with -inf outside the KEPT best of GROUPS groups, by the sum of a group's two best keys."""
    group = c // (E // GROUPS)
    g = tl.arange(0, M)[None, :]
    score = tl.full([1, M], _LOWEST, dtype=tl.float32)
    for i in range(GROUPS):
        inside = (group == i) & (c < E)
        first, at = _best(key, inside, c, N)
        second, unused = _best(key, inside & (c != at), c, N)
        score = tl.where(g == i, first + second, score)
    free = g < GROUPS
    kept = c < 0
    for i in range(KEPT):
        unused, at = _best(score, free, g, M)
        free = free & (g != at)
        kept = kept | (group == at)
    return tl.where(kept, key, _LOWEST)


@triton.jit
def route_kernel(logits, bias, weights, experts, stride, scale, E: tl.constexpr, N: tl.constexpr, LOGN: tl.constexpr, TOP: tl.constexpr,
                 P: tl.constexpr, RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
                 GROUPS: tl.constexpr, KEPT: tl.constexpr, M: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, N)[None, :]
    score = _scores(logits, row, stride, E, N, LOGN, SIGMOID)
    key = score
    if BIAS:
        key = key + tl.load(bias + c, mask=c < E, other=0.0)
    key = tl.where(key == key, key, _LOWEST)  # NaN ranks below every number
    if GROUPS > 1:
        key = _in_best_groups(key, c, E, N, GROUPS, KEPT, M)
    r = tl.arange(0, P)[None, :]
    chosen = tl.zeros([1, P], dtype=tl.int32)
    value = tl.zeros([1, P], dtype=tl.float32)
    total = tl.zeros([1, 1], dtype=tl.float32)
    free = c < E
    for i in range(TOP):
        unused, at = _best(key, free, c, N)
        free = free & (c != at)
        w = column(score, c == at, 1)[:, None]
        chosen = tl.where(r == i, at, chosen)
        value = tl.where(r == i, w, value)
        total = tl.where(i == 0, w, total + w)
    if RENORMALIZE:
        if SIGMOID:
            total = total + 1e-20
        value = tl.div_rn(value, total + tl.zeros([1, P], dtype=tl.float32))
    if SCALE:
        value = value * scale
    tl.store(weights + row * TOP + r, value, mask=r < TOP)
    tl.store(experts + row * TOP + r, chosen.to(tl.int64), mask=r < TOP)


@triton.jit
def route_grad_kernel(grad, logits, experts, out, stride, scale, E: tl.constexpr, N: tl.constexpr, LOGN: tl.constexpr, TOP: tl.constexpr,
                      RENORMALIZE: tl.constexpr, SIGMOID: tl.constexpr):  # fmt: skip
    """Of w_r = scale * u_r / sum(u) (or scale * u_r), u_r = score[experts_r], with respect to the logits."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, N)[None, :]
    score = _scores(logits, row, stride, E, N, LOGN, SIGMOID)
    g = tl.zeros([1, N], dtype=tl.float32)
    mine = c < 0
    for i in range(TOP):
        here = c == tl.load(experts + row * TOP + i)
        g = tl.where(here, tl.load(grad + row * TOP + i) * scale, g)
        mine = mine | here
    if RENORMALIZE:
        total = tl.sum(tl.where(mine, score, 0.0), 1)[:, None]
        if SIGMOID:
            total = total + 1e-20
        mean = tl.sum(tl.where(mine, g * score, 0.0), 1)[:, None] / total
        g = tl.where(mine, (g - mean) / total, 0.0)
    if SIGMOID:
        g = g * score * (1.0 - score)
    else:
        g = score * (g - tl.sum(g * score, 1)[:, None])
    tl.store(out + row * E + c, g, mask=c < E)


class Route(torch.autograd.Function):
    """(weights [T, k] fp32, experts [T, k] int64) of fp32 logits [T, E]; see :func:`isoexec.ops.moe.route`."""

    @staticmethod
    def forward(ctx, logits, top_k, renormalize, sigmoid_scores, bias, scale, n_group, topk_group):
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        T, E = logits.shape
        N = power_of_two(E)
        weights = torch.empty(T, top_k, dtype=torch.float32, device=logits.device)
        experts = torch.empty(T, top_k, dtype=torch.int64, device=logits.device)
        if T:
            route_kernel[T,](
                logits, logits if bias is None else bias, weights, experts, logits.stride(0), scale, E, N, N.bit_length() - 1, top_k,
                power_of_two(top_k), renormalize, sigmoid_scores, bias is not None, scale != 1.0, n_group, topk_group, power_of_two(n_group),
                num_warps=1, **COMPILE,
            )  # fmt: skip
        ctx.save_for_backward(logits, experts)
        ctx.form = top_k, renormalize, sigmoid_scores, scale
        ctx.mark_non_differentiable(experts)
        return weights, experts

    @staticmethod
    def backward(ctx, grad, _):
        logits, experts = ctx.saved_tensors
        top_k, renormalize, sigmoid_scores, scale = ctx.form
        (T, E), N = logits.shape, power_of_two(logits.shape[1])
        out = torch.empty(T, E, dtype=torch.float32, device=logits.device)
        if T:
            route_grad_kernel[T,](
                grad.contiguous(), logits, experts, out, logits.stride(0), scale, E, N, N.bit_length() - 1, top_k, renormalize,
                sigmoid_scores, num_warps=1, **COMPILE,
            )  # fmt: skip
        return out, None, None, None, None, None, None, None
