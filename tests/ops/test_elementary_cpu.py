"""Elementary functions, fixed sums and bit comparison: what every op of the CPU backend stands on."""

import math as host

import pytest
import torch

from isoexec.ops._core import math
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops._core.rowsum import row_sum, tree_sum
from op_checks import same_bits

FUNCTIONS = {
    "exp": (math.exp, torch.exp, torch.linspace(-104, 88.7, 20_001)),
    "log": (math.log, torch.log, torch.logspace(-44, 38, 20_001)),
    "log1p": (math.log1p, torch.log1p, torch.cat([torch.logspace(-40, 38, 10_001), -torch.rand(10_000) * 0.9])),
    "rsqrt": (math.rsqrt, torch.rsqrt, torch.logspace(-44, 38, 20_001)),
    "sigmoid": (math.sigmoid, torch.sigmoid, torch.linspace(-87, 87, 20_001)),
    "silu": (math.silu, torch.nn.functional.silu, torch.linspace(-87, 87, 20_001)),
    "softplus": (math.softplus, torch.nn.functional.softplus, torch.linspace(-87, 87, 20_001)),
}
ULPS = {"exp": 0.501, "log": 0.501, "log1p": 0.501, "rsqrt": 1.6, "sigmoid": 2.6, "silu": 3.2, "softplus": 1.6}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accuracy(name):
    function, exact, x = FUNCTIONS[name]
    expected = exact(x.double())
    ulp = torch.exp2(torch.frexp(expected.abs().clamp(min=2.0**-126))[1].double() - 24)
    assert ((function(x).double() - expected).abs() <= ULPS[name] * ulp + 1e-50).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_element_depends_on_its_value_alone(name):
    function, _, x = FUNCTIONS[name]
    whole = function(x)
    order = torch.randperm(len(x))
    same_bits(function(x[order]), whole[order], "order")
    for start, length in ((0, 1), (1, 7), (3, 16), (5, 33), (11, 1000)):
        same_bits(function(x[start : start + length]), whole[start : start + length], "cut")
    same_bits(function(x[::3]), whole[::3], "stride")
    same_bits(function(x[:20_000].view(100, 200).t()).t().reshape(-1), whole[:20_000], "layout")


def test_rsqrt_is_a_correctly_rounded_root_and_a_division():
    """torch.sqrt is not correctly rounded on the CPU (MKL VML), so it must not come back."""
    x = torch.cat([torch.logspace(-44, 38, 5000), torch.rand(5000)])
    root = torch.tensor([host.sqrt(v) for v in x.tolist()], dtype=torch.float32)  # fp64 root rounded again: exact for fp32 arguments
    same_bits(math.rsqrt(x), 1.0 / root, "rsqrt")
    same_bits(math.rsqrt(x.repeat_interleave(3)[::3]), 1.0 / root, "strided")


def test_special_values():
    x = torch.tensor([host.nan, host.inf, -host.inf, -0.0, 0.0])
    assert math.exp(x).tolist()[1:] == [host.inf, 0.0, 1.0, 1.0] and math.exp(x)[0].isnan()
    assert math.log(x[1:2]).item() == host.inf and math.log(x[3:]).tolist() == [-host.inf, -host.inf]
    assert math.log(torch.tensor([-1.0, host.nan])).isnan().all()
    assert math.exp(torch.tensor([-103.9])).item() == 2.0**-149, "subnormal results are kept"
    assert bit_equal(math.silu(x[3:]), x[3:])


def test_only_fp32_is_accepted():
    for function in (math.exp, math.log, row_sum):
        with pytest.raises(TypeError, match="torch.float64"):
            function(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("N", [1, 2, 3, 64, 100, 1024])
def test_row_sum_halves_a_padded_row(N):
    x = torch.randn(5, N)
    width = 1 << (N - 1).bit_length()
    for row, found in zip(x, row_sum(x)):
        parts = row.tolist() + [0.0] * (width - N)
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [float(torch.tensor(a) + torch.tensor(b)) for a, b in zip(parts[:half], parts[half:])]
        same_bits(found[None], torch.tensor(parts), "row sum")
    same_bits(row_sum(x.t().contiguous().t()), row_sum(x), "layout")
    y = x.clone().requires_grad_()
    row_sum(y).sum().backward()
    assert (y.grad == 1).all()


def test_tree_sum_adds_neighbours_first():
    x = torch.randn(8, 3)
    pairs = [x[i] + x[i + 1] for i in range(0, 8, 2)]
    same_bits(tree_sum(x), (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]), "tree")
    for ranks in (2, 4):
        same_bits(tree_sum(torch.stack([tree_sum(part) for part in x.chunk(ranks)])), tree_sum(x), f"{ranks} subtrees")
    with pytest.raises(ValueError, match="power of two"):
        tree_sum(x[:6])


def test_equality_is_of_bits():
    zero, nan = torch.tensor([0.0]), torch.tensor([host.nan])
    assert not bit_equal(zero, -zero) and bit_equal(nan, nan.clone())
    assert not bit_equal(zero, zero.bfloat16()) and not bit_equal(zero, torch.zeros(2))
    with pytest.raises(AssertionError, match=r"x: 1 of 4 elements differ, first at \(1, 0\)"):
        assert_bit_equal(torch.ones(2, 2), nudge(torch.ones(2, 2), 2), "x")
