"""Rope, gated activations and embedding in Triton."""

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.activation import reference as activation_reference
from isoexec.ops.activation import triton as activation
from isoexec.ops.embedding import reference as embedding_reference
from isoexec.ops.embedding import triton as embedding
from isoexec.ops.rope import reference as rope_reference
from isoexec.ops.rope import triton as rope


@pytest.mark.parametrize("theta,rotary_dim", [(1e6, 128), (1e7, 64)])
def test_rope_table_has_the_bits_of_the_cpu_backend(device, theta, rotary_dim):
    positions = torch.tensor([0, 1, 2, 3, 1000, 4095, 32767, 262143, 1048575])
    want = rope_reference.rope_table(positions, rotary_dim, theta)
    got = rope.rope_table(positions.to(device), rotary_dim, theta)
    for g, w in zip(got, want):
        assert_bit_equal(g.cpu(), w, "table")
    assert not bit_equal(got[0].cpu(), rope_reference.rope_table(positions + 1, rotary_dim, theta)[0])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("K,rotary_dim", [(64, 64), (80, 32)])
def test_rotation_has_the_bits_of_the_cpu_backend(random, K, rotary_dim, interleaved):
    q = random(7, 5 * K)[:, K : 4 * K].unflatten(1, (3, K)).requires_grad_()
    cos, sin = (t.to(q.device) for t in rope_reference.rope_table(torch.arange(7), rotary_dim, 1e6))
    y = rope.apply_rope(q, cos, sin, interleaved=interleaved)
    host = q.detach().cpu().requires_grad_()
    want = rope_reference.apply_rope(host, cos.cpu(), sin.cpu(), interleaved=interleaved)
    assert_bit_equal(y.cpu(), want)
    assert_bit_equal(y[:, :, rotary_dim:], q[:, :, rotary_dim:], "channels that do not rotate")
    grad = random(*y.shape)
    (g,), (w,) = torch.autograd.grad(y, q, grad), torch.autograd.grad(want, host, grad.cpu())
    assert_bit_equal(g.cpu(), w, "gradient")
    assert not bit_equal(y, rope.apply_rope(q, nudge(cos, 3, 1 << 16), sin, interleaved=interleaved))
    assert not bit_equal(y, rope.apply_rope(q, cos, sin, interleaved=not interleaved))


def _near(y, want):
    return ((y.double() - want).abs() <= want.abs() * (2.0**-8 + 2.0**-18) + 1e-36).all()


def _compare_gradients(op, reference, tensors, grad):
    leaves, host = [t.detach().requires_grad_() for t in tensors], [t.detach().cpu().requires_grad_() for t in tensors]
    got = torch.autograd.grad(op(*leaves), leaves, grad)
    for g, w in zip(got, torch.autograd.grad(reference(*host), host, grad.cpu())):
        assert (g.cpu().float() - w.float()).norm() <= 4e-3 * w.float().norm()
    for g, again in zip(got, torch.autograd.grad(op(*leaves), leaves, grad)):
        assert_bit_equal(g, again, "gradient of a second run")


@pytest.mark.parametrize("F", [48, 3000])
def test_silu_mul(random, F):
    x = random(3, 2 * F, scale=4.0)
    x[0, :4] = torch.tensor([-0.0, 90.0, -90.0, -100.0], dtype=x.dtype)
    y = activation.silu_mul(x)
    gate, up = x.double().chunk(2, -1)
    assert _near(y, gate * torch.sigmoid(gate) * up)
    assert_bit_equal(activation.silu_mul(x[1:2]), y[1:2], "a row alone")
    assert not bit_equal(activation.silu_mul(nudge(x, 7)), y)
    _compare_gradients(activation.silu_mul, activation_reference.silu_mul, [random(2, 2 * F)], random(2, F))


@pytest.mark.parametrize("gate_width", [1, 64])
def test_sigmoid_gate(random, gate_width):
    x, gate = random(5, 3, 64), random(5, 3 * (gate_width + 8))
    gate = gate.unflatten(1, (3, -1))[:, :, 8:]  # a view, as the models pass it
    y = activation.sigmoid_gate(x, gate)
    assert _near(y, x.double() * torch.sigmoid(gate.double()))
    assert_bit_equal(activation.sigmoid_gate(x[2:3], gate[2:3]), y[2:3], "a token alone")
    _compare_gradients(activation.sigmoid_gate, activation_reference.sigmoid_gate, [x, gate], random(5, 3, 64))
    with pytest.raises(ContractError, match="expand the gate"):
        activation.sigmoid_gate(x, gate[:1])


def test_embedding(random, device):
    weight = random(40, 96)
    weight[3, 0] = -0.0
    ids = torch.tensor([3, 39, 3, 0, 7, 3, 7], device=device)
    y = embedding.embedding(ids, weight)
    assert_bit_equal(y, weight[ids])
    assert not bit_equal(y, nudge(weight, 3 * 96)[ids])
    leaf, host = weight.clone().requires_grad_(), weight.cpu().requires_grad_()
    grad = random(7, 96)
    (got,) = torch.autograd.grad(embedding.embedding(ids, leaf), leaf, grad)
    (want,) = torch.autograd.grad(embedding_reference.embedding(ids.cpu(), host), host, grad.cpu())
    assert_bit_equal(got.cpu(), want, "gradient: each token's rows in order")
