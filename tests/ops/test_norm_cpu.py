"""Norms and the residual add of the CPU backend."""

import pytest
import torch

from isoexec.ops import norm
from isoexec.ops._core.bits import bit_equal
from op_checks import batch_invariant, bf16_values, gradients_close, same_bits

EPS = 1e-6


def exact_norm(x, eps=EPS):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("D", [16, 100, 128, 1024])
def test_norms_are_accurate(D):
    x, w, z = bf16_values(33, D), bf16_values(D), bf16_values(33, D)
    n = exact_norm(x.double())
    for found, expected in (
        (norm.zero_centered_rms_norm(x, w, EPS), n * (1 + w.double())),
        (norm.gated_rms_norm(x, z, w, EPS), n * w.double() * z.double() * z.double().sigmoid()),
        (norm.rms_norm(x, w, EPS), n * w.double()),
    ):
        assert ((found.double() - expected).abs() <= expected.abs() * 1e-6).all()


def test_the_rounding_before_the_weight_is_kept():
    x, w = bf16_values(64, 128).bfloat16(), (1 + 0.1 * torch.randn(128)).bfloat16()
    before = norm.rms_norm(x.float(), torch.ones(128), EPS)
    same_bits(norm.rms_norm(x, w, EPS), before.bfloat16() * w, "inner rounding")
    assert not bit_equal(norm.rms_norm(x, w, EPS), (before * w.float()).bfloat16())


@pytest.mark.parametrize("D", [96, 128])
def test_rows_do_not_depend_on_the_batch(D):
    x, r, w = bf16_values(257, D), bf16_values(257, D), bf16_values(D)
    for dtype in (torch.float32, torch.bfloat16):
        a, b, c = x.to(dtype), r.to(dtype), w.to(dtype)
        batch_invariant(norm.residual_add, a, b, what="residual_add")
        batch_invariant(lambda a: norm.rms_norm(a, c, EPS), a, what="rms_norm")
        batch_invariant(lambda a: norm.zero_centered_rms_norm(a, c, EPS), a, what="zero_centered_rms_norm")
        batch_invariant(lambda a, b: norm.gated_rms_norm(a, b, c, EPS), a, b, what="gated_rms_norm")


def test_layout_moves_nothing():
    qkv, w = bf16_values(20, 3, 4, 32), bf16_values(32)
    same_bits(norm.rms_norm(qkv[:, 1], w, EPS), norm.rms_norm(qkv[:, 1].contiguous(), w, EPS), "strided view")
    transposed = qkv[:, 0].transpose(0, 1)
    same_bits(norm.rms_norm(transposed, w, EPS).transpose(0, 1), norm.rms_norm(qkv[:, 0], w, EPS), "transposed view")


def test_fused_forms_read_the_rounded_sum():
    x, r, w = (bf16_values(*s).bfloat16() for s in ((17, 64), (17, 64), (64,)))
    total = (x.float() + r.float()).bfloat16()
    for fused, plain in ((norm.add_rms_norm, norm.rms_norm), (norm.add_zero_centered_rms_norm, norm.zero_centered_rms_norm)):
        normed, residual = fused(x, r, w, EPS)
        same_bits(residual, total, "residual")
        same_bits(normed, plain(total, w, EPS), "normed")


def test_subnormals_and_signed_zeros():
    tiny = torch.full((3, 16), 2.0**-133, dtype=torch.bfloat16)
    same_bits(norm.residual_add(tiny, torch.zeros_like(tiny)), tiny, "subnormal residual")
    assert (norm.rms_norm(tiny, torch.full((16,), 1.0, dtype=torch.bfloat16), EPS) > 0).all()
    zero = torch.tensor([[-0.0, 0.0]], dtype=torch.bfloat16)
    same_bits(norm.residual_add(zero, zero), zero, "sum of negative zeros")


def test_gradients():
    x, r, w, z = (bf16_values(*s).bfloat16() for s in ((5, 3, 64), (5, 3, 64), (64,), (5, 3, 64)))
    gradients_close(norm.residual_add, torch.add, (x, r))
    gradients_close(lambda x, w: norm.rms_norm(x, w, EPS), lambda x, w: exact_norm(x) * w, (x, w))
    gradients_close(lambda x, w: norm.zero_centered_rms_norm(x, w, EPS), lambda x, w: exact_norm(x) * (1 + w), (x, w))
    gradients_close(lambda x, z, w: norm.gated_rms_norm(x, z, w, EPS), lambda x, z, w: exact_norm(x) * w * z * z.sigmoid(), (x, z, w))
    gradients_close(
        lambda x, r, w: torch.add(*norm.add_rms_norm(x, r, w, EPS)), lambda x, r, w: exact_norm(x + r) * w + (x + r), (x, r, w)
    )
