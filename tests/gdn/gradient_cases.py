"""Gradients of the core: ours by autograd, and those of the token recurrence in fp64."""

from __future__ import annotations

import torch

from isoexec.ops import gdn

NAMES = "q k v g beta".split()


def gradients(form, x, lengths, chunk, weight):
    """-> gradients of q, k, v, g, beta where the output's is ``weight``."""
    leaves = [t.clone().requires_grad_() for t in x]
    out = getattr(gdn, form)(*leaves, gdn.Plan(lengths, chunk, device=x[0].device))
    return torch.autograd.grad(out, leaves, weight)


def recurrence_gradients(x, lengths, weight):
    """fp64 autograd, token by token."""
    x64 = [t.double().requires_grad_() for t in x]
    q, k, v, g, beta = x64
    repeat = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    outputs, first = [], 0
    for length in lengths:
        S = q.new_zeros(v.shape[1], v.shape[2], q.shape[2])
        for t in range(first, first + length):
            S = S * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (S @ k[t][..., None])[..., 0])
            S = S + u[..., None] * k[t][:, None, :]
            outputs.append(q.shape[-1] ** -0.5 * (S @ q[t][..., None])[..., 0])
        first += length
    # Not with gradients given to autograd.grad: torch would import its symbolic shapes, which takes seconds.
    return torch.autograd.grad((torch.stack(outputs) * weight.double()).sum(), x64)
