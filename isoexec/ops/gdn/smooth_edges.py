"""Plain torch formulas of the ops around the core, for gradients only: their values are never used."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def conv1d(x, weight, plan):
    taps, positions = weight.shape[1], plan.token_table[:, 1]
    total = x * weight[:, -1]
    for back in range(1, taps):
        inside = (positions >= back)[:, None]
        total = total + torch.where(inside, x.roll(back, 0), 0.0) * weight[:, -1 - back]
    return F.silu(total)


def gating(a, b, A_log, dt_bias):
    return -A_log.exp() * F.softplus(a + dt_bias), torch.sigmoid(b)


def l2norm(x, eps):
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def mixer_inputs(x, a, b, weight, A_log, dt_bias, plan, H, HV, K, V, eps):
    q, k, v = conv1d(x, weight, plan).split((H * K, H * K, HV * V), -1)
    heads = (t.unflatten(-1, (-1, d)) for t, d in ((q, K), (k, K), (v, V)))
    q, k, v = heads
    return l2norm(q, eps), l2norm(k, eps), v, *gating(a, b, A_log, dt_bias)
