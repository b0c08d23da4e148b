"""Gradients of the trainer path on the CPU, against fp64 autograd of the token recurrence."""

import pytest
import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal
from tests.gdn.cases import inputs


def recurrence_grad(x, lengths, weight):
    """fp64 autograd, token by token."""
    x64 = [t.double().requires_grad_() for t in x]
    q, k, v, g, beta = x64
    repeat = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    outputs, first = [], 0
    for length in lengths:
        S = torch.zeros(v.shape[1], v.shape[2], q.shape[2], dtype=torch.float64)
        for t in range(first, first + length):
            S = S * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (S @ k[t][..., None])[..., 0])
            S = S + u[..., None] * k[t][:, None, :]
            outputs.append(q.shape[-1] ** -0.5 * (S @ q[t][..., None])[..., 0])
        first += length
    o = torch.stack(outputs)
    return torch.autograd.grad(o, x64, weight.double())


@pytest.mark.parametrize("lengths", [[1], [16], [40], [17, 0, 5, 33]])
def test_gradients_against_fp64_autograd(lengths):
    x = inputs(lengths, H=1, HV=2)
    weight = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in x]
    o = gdn.cpr_wy(*leaves, gdn.Plan(lengths, 16), out_dtype=torch.float32)
    grads = torch.autograd.grad(o, leaves, weight)
    for name, ours, exact in zip("q k v g beta".split(), grads, recurrence_grad(x, lengths, weight)):
        bound = 3e-3 if ours.dtype == torch.bfloat16 else 1e-5
        error, size = float((ours.double() - exact).norm()), float(exact.norm())
        assert error <= bound * size, name  # the decay of a single token has no effect: exactly zero


def test_two_backward_runs_are_equal():
    x = inputs([37])
    leaves = [t.clone().requires_grad_() for t in x]
    runs = []
    for _ in range(2):
        o = gdn.cpr_wy(*leaves, gdn.Plan([37], 16), out_dtype=torch.float32)
        runs.append(torch.autograd.grad(o.square().sum(), leaves))
    for a, b in zip(*runs):
        assert_bit_equal(a, b, "gradient")
