"""Gated activations of the CPU backend."""

import torch

from isoexec.ops import activation
from isoexec.ops._core import math
from isoexec.ops._core.bits import bit_equal
from op_checks import batch_invariant, bf16_values, gradients_close, same_bits


def test_accuracy():
    x = bf16_values(33, 200, scale=3.0)
    gate, up = x.double().chunk(2, -1)
    expected = gate * gate.sigmoid() * up
    assert ((activation.silu_mul(x).double() - expected).abs() <= expected.abs() * 4e-7).all()
    expected = gate * up.sigmoid()
    found = activation.sigmoid_gate(gate.float(), up.float())
    assert ((found.double() - expected).abs() <= expected.abs() * 4e-7).all()


def test_silu_is_x_times_sigmoid_and_not_a_quotient():
    x = bf16_values(1, 8192, scale=4.0)
    found = activation.silu_mul(torch.cat([x, torch.ones_like(x)], -1))
    same_bits(found, x * (1.0 / (1.0 + math.exp(-x))), "silu")
    assert not bit_equal(found, x / (1.0 + math.exp(-x)))


def test_rows_do_not_depend_on_the_batch():
    x, g = bf16_values(257, 70), bf16_values(257, 35)
    for dtype in (torch.float32, torch.bfloat16):
        batch_invariant(activation.silu_mul, x.to(dtype), what="silu_mul")
        batch_invariant(activation.sigmoid_gate, g.to(dtype), g.flip(1).to(dtype), what="sigmoid_gate")


def test_a_single_element_has_the_bits_it_has_in_any_place():
    x = bf16_values(77, scale=5.0)
    whole = math.silu(x)
    same_bits(torch.cat([math.silu(x[i : i + 1]) for i in range(77)]), whole, "one by one")
    same_bits(torch.cat([math.silu(x[:3]), math.silu(x[3:])]), whole, "cut")
    same_bits(math.silu(x.expand(2, 77).t())[:, 1], whole, "strided")


def test_extreme_gates():
    gate = torch.tensor([-200.0, -88.0, -0.0, 0.0, 88.0, 3e38], dtype=torch.bfloat16)
    out = activation.silu_mul(torch.cat([gate, torch.ones_like(gate)]))
    assert out.isfinite().all() and out[3] == 0 and not bit_equal(out[2], out[3]), "silu(-0.0) is -0.0"
    assert out[0] == 0 and out[-1] == gate[-1]


def test_gradients():
    x, g = bf16_values(6, 40).bfloat16(), bf16_values(6, 1).bfloat16()
    gradients_close(activation.silu_mul, lambda x: x[:, :20] * x[:, :20].sigmoid() * x[:, 20:], (x,))
    gradients_close(activation.sigmoid_gate, lambda x, g: x * g.sigmoid(), (x, g))
