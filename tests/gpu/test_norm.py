"""Norms in Triton: the CPU backend's bits where no exp is involved, independence of the batch, gradients."""

import os

import pytest
import torch

from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.norm import reference
from isoexec.ops.norm import triton as norm

EPS = 1e-6
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
WIDTHS = (16, 96) if INTERPRET else (16, 96, 128, 2048, 5120)


@pytest.fixture(autouse=True)
def _rounding(device):
    if device.type == "cpu":
        assert torch.tensor(1.005859375).bfloat16().float() == torch.tensor(1.0078125), "ties to even"


@pytest.mark.parametrize("D", WIDTHS)
def test_norms_have_the_bits_of_the_cpu_backend(random, D):
    x, residual, weight = random(5, D, scale=3.0), random(5, D), random(D)
    host = [t.cpu() for t in (x, residual, weight)]
    for name in ("rms_norm", "zero_centered_rms_norm"):
        assert_bit_equal(getattr(norm, name)(x, weight, EPS).cpu(), getattr(reference, name)(host[0], host[2], EPS), name)
    for name in ("add_rms_norm", "add_zero_centered_rms_norm"):
        for got, want in zip(getattr(norm, name)(x, residual, weight, EPS), getattr(reference, name)(*host, EPS)):
            assert_bit_equal(got.cpu(), want, name)
    assert_bit_equal(norm.residual_add(x, residual).cpu(), reference.residual_add(*host[:2]))


def test_a_planted_ulp_shows(random):
    x, weight = random(3, 128), random(128)
    y = norm.rms_norm(x, weight, EPS)
    assert bit_equal(y, norm.rms_norm(x, weight, EPS))
    assert not bit_equal(y, norm.rms_norm(x, nudge(weight, 5), EPS))
    assert not bit_equal(y, nudge(y, 200))


@pytest.mark.parametrize("name", ["rms_norm", "zero_centered_rms_norm", "gated_rms_norm"])
@pytest.mark.parametrize("D", WIDTHS[1:])
def test_a_row_does_not_depend_on_its_batch(random, name, D):
    x, gate, weight = random(9, D), random(9, D), random(D)
    op = getattr(norm, name)
    args = (lambda s: (x[s], gate[s], weight, EPS)) if name == "gated_rms_norm" else (lambda s: (x[s], weight, EPS))
    whole = op(*args(slice(None)))
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9)):
        assert_bit_equal(op(*args(rows)), whole[rows], f"{name} rows {rows}")


def test_views_are_read_where_they_lie(random):
    qkv, weight = random(4, 7 * 64), random(64)
    q = qkv[:, 64 : 6 * 64].unflatten(1, (5, 64))  # odd offset, strided rows
    assert not q.is_contiguous()
    assert_bit_equal(norm.rms_norm(q, weight, EPS), norm.rms_norm(q.contiguous(), weight, EPS))
    odd = random(4, 65)[:, 1:]
    assert_bit_equal(norm.rms_norm(odd, weight, EPS), norm.rms_norm(odd.contiguous(), weight, EPS))


def test_gated_norm_is_within_its_rounding(random):
    x, gate, weight = random(6, 128), random(6, 128, scale=4.0), random(128)
    y = norm.gated_rms_norm(x, gate, weight, EPS).double()
    d, z = x.double(), gate.double()
    want = d / (d.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double() * z * torch.sigmoid(z)
    assert ((y - want).abs() <= want.abs() * (2.0**-8 + 2.0**-18) + 1e-38).all()


def test_launch_moves_no_bit(random, hardware, monkeypatch):
    for D in (128, 4096):
        x, residual, weight = random(64, D), random(64, D), random(D)
        want = norm.add_rms_norm(x, residual, weight, EPS)[0]
        N = norm.launch(D)[0]
        for R, warps in ((1, 1), (1, 8), (2, 4)):
            monkeypatch.setattr(norm, "launch", lambda width, entry=(N, R, warps): entry)
            assert_bit_equal(norm.add_rms_norm(x, residual, weight, EPS)[0], want, f"D {D}, {R} rows, {warps} warps")
        monkeypatch.undo()


def _gradients(module, name, tensors, grads):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = getattr(module, name)(*leaves, EPS)
    torch.autograd.backward(out if isinstance(out, tuple) else (out,), grads)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", ["rms_norm", "zero_centered_rms_norm", "add_rms_norm", "add_zero_centered_rms_norm", "gated_rms_norm"])
@pytest.mark.parametrize("D", WIDTHS[1:])
def test_gradients(random, name, D):
    shape = (3, 5, D)
    two = "add" in name or "gated" in name
    tensors = [random(*shape) for _ in range(1 + two)] + [random(D)]
    grads = [random(*shape) for _ in range(2 if "add" in name else 1)]
    got = _gradients(norm, name, tensors, grads)
    want = _gradients(reference, name, [t.cpu() for t in tensors], [g.cpu() for g in grads])
    for g, w in zip(got, want):
        assert (g.cpu().float() - w.float()).norm() <= 4e-3 * w.float().norm()
    for g, again in zip(got, _gradients(norm, name, tensors, grads)):
        assert_bit_equal(g, again, "gradient of a second run")


def test_no_rows(random):
    assert norm.rms_norm(random(0, 128), random(128), EPS).shape == (0, 128)
