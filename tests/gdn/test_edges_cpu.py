"""Convolution, gating and l2norm on the CPU."""

import pytest
import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge


def data(lengths, D=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(lengths), D, generator=generator).bfloat16()
    weight = torch.randn(D, 4, generator=generator).bfloat16()
    return x, weight


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 65])
def test_conv_steps_equal_sequence(length):
    x, weight = data([length])
    y, window = gdn.conv1d(x, weight, gdn.Plan([length], 16))
    pool = torch.zeros(2, 3, x.shape[1], dtype=torch.bfloat16)
    slots = torch.tensor([1], dtype=torch.int32)
    steps = torch.cat([gdn.conv1d_step(x[t : t + 1], weight, pool, slots) for t in range(length)])
    assert_bit_equal(steps, y, "steps")
    assert_bit_equal(pool[1:], window, "window")


@pytest.mark.parametrize("cut", range(10))
def test_conv_split_and_dirty_window(cut):
    x, weight = data([9])
    y, window = gdn.conv1d(x, weight, gdn.Plan([9], 16))
    dirty = torch.full((1, 3, x.shape[1]), float("nan"), dtype=torch.bfloat16)
    a, middle = gdn.conv1d(x[:cut], weight, gdn.Plan([cut], 16), dirty)
    b, last = gdn.conv1d(x[cut:], weight, gdn.Plan([9 - cut], 16, [cut]), middle)
    assert_bit_equal(torch.cat([a, b]), y, "split")
    assert_bit_equal(last, window, "window")


def test_conv_packed_and_formula():
    lengths = [5, 0, 1, 9]
    x, weight = data(lengths)
    y, _ = gdn.conv1d(x, weight, gdn.Plan(lengths, 16))
    alone, _ = gdn.conv1d(x[6:], weight, gdn.Plan([9], 16))
    assert_bit_equal(y[6:], alone, "packed")
    taps = torch.nn.functional.pad(x[6:].double(), (0, 0, 3, 0))
    exact = torch.nn.functional.silu(sum(taps[j : j + 9] * weight.double()[:, j] for j in range(4)))
    assert float((alone.double() - exact).norm() / exact.norm()) < 3e-3


def test_conv_inert_lanes():
    x, weight = data([2])
    pool = torch.ones(2, 3, x.shape[1], dtype=torch.bfloat16)
    y = gdn.conv1d_step(x, weight, pool, torch.tensor([-1, 0], dtype=torch.int32), null_slot=0)
    assert bit_equal(y, torch.zeros_like(y)) and bit_equal(pool, torch.ones_like(pool))


def test_gating_formula_batch_and_control():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(70, 4, generator=generator).bfloat16() * 8 for _ in range(2))
    a[3], b[3] = 60.0, -60.0
    A_log, dt_bias = torch.rand(4, generator=generator) * 3, torch.randn(4, generator=generator)
    g, beta = gdn.gating(a, b, A_log, dt_bias)
    exact = -A_log.double().exp() * torch.nn.functional.softplus((a.float() + dt_bias).double(), threshold=20)
    torch.testing.assert_close(g.double(), exact, rtol=3e-7, atol=1e-30)
    torch.testing.assert_close(beta.double(), torch.sigmoid(b.double()), rtol=3e-7, atol=1e-30)
    for t in (0, 3, 69):
        for whole, row in zip((g, beta), gdn.gating(a[t : t + 1], b[t : t + 1], A_log, dt_bias)):
            assert_bit_equal(whole[t : t + 1], row, f"row {t}")
    assert not bit_equal(g, gdn.gating(a, b, A_log, nudge(dt_bias, 1, 8))[0])
    rounded = gdn.gating(a, b, A_log.bfloat16().float(), dt_bias)[0]
    assert not bit_equal(g, rounded)  # A_log cast to bf16 is another decay


@pytest.mark.parametrize("K", [16, 96, 128])
def test_l2norm(K):
    x = torch.randn(33, 2, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[4] = 0.0
    x[5] = 1e-39
    y = gdn.l2norm(x)
    exact = x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(y.double(), exact, rtol=4e-3, atol=1e-38)
    for t in (0, 4, 32):
        assert_bit_equal(gdn.l2norm(x[t]), y[t], f"row {t}")


def test_edges_have_gradients():
    x, weight = data([6])
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y, _ = gdn.conv1d(x, weight, gdn.Plan([6], 16))
    y = gdn.l2norm(y)
    grads = torch.autograd.grad(y.float().square().sum(), (x, weight), allow_unused=False)
    assert all(bool(torch.isfinite(d).all()) for d in grads)
