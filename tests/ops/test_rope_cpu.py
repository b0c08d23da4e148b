"""Rotary embedding of the CPU backend."""

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import rope
from isoexec.ops._core import math
from isoexec.ops._core.bits import as_bits, bit_equal
from op_checks import batch_invariant, bf16_values, gradients_close, same_bits

THETA = 1e6


def test_cos_and_sin_are_the_rounded_functions_of_the_fp32_angle():
    positions = torch.cat([torch.arange(300), torch.randint(0, 1_000_000, (3000,))])
    cos, sin = rope.rope_table(positions, 64, THETA)
    inverse = torch.tensor([THETA ** (-2 * i / 64) for i in range(32)], dtype=torch.float64).float()
    angle = (positions.float()[:, None] * inverse).double()
    # Half an ulp of fp32 relative to each value, and what fp64 itself leaves near the zeros.
    for found, expected in ((cos, angle.cos()), (sin, angle.sin())):
        assert ((found.double() - expected).abs() <= expected.abs() * 2.0**-23.99 + 1e-15).all()


def test_a_row_depends_on_its_position_alone():
    positions = torch.randint(0, 100_000, (257,))
    for part in (0, 1):
        batch_invariant(lambda p: rope.rope_table(p, 24, THETA)[part], positions, what="rope_table")
    whole, direct = rope.rope_table(torch.arange(64), 24, THETA), rope.rope_table(torch.arange(32, 64), 24, THETA)
    same_bits(direct[0], whole[0][32:], "cos")


def test_quadrants_and_signs():
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, -1.0, 1e6])
    cos, sin = math.cos_sin(x)
    same_bits(cos, x.double().cos().float(), "cos")
    same_bits(sin, x.double().sin().float(), "sin")


def rotated(x, cos, sin):
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]], -1)


@pytest.mark.parametrize("rotary_dim", [32, 8])
def test_rotation(rotary_dim):
    x, table = bf16_values(257, 3, 32), rope.rope_table(torch.arange(257), rotary_dim, THETA)
    found = rope.apply_rope(x, *table)
    assert (found.double() - rotated(x.double(), *(t.double() for t in table))).abs().max() < 1e-6
    batch_invariant(rope.apply_rope, x, *table, what="apply_rope")
    batch_invariant(rope.apply_rope, x.bfloat16(), *table, what="apply_rope")
    qkv = bf16_values(257, 5, 32)
    same_bits(rope.apply_rope(qkv[:, 1:4], *table), rope.apply_rope(qkv[:, 1:4].contiguous(), *table), "strided view")


def test_channels_beyond_the_rotary_ones_keep_their_bits():
    x = torch.full((2, 1, 16), -0.0, dtype=torch.bfloat16)
    out = rope.apply_rope(x, *rope.rope_table(torch.arange(2), 8, THETA))
    same_bits(out[..., 8:], x[..., 8:], "untouched channels")


def pairs_apart(x):
    """Channels 0, 2, 4, ... then 1, 3, 5, ...: what pairs halves of the result paired neighbours of ``x``."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)


@pytest.mark.parametrize("rotary_dim", [32, 8])
def test_interleaved_rotation(rotary_dim):
    x, table = bf16_values(257, 3, 32).bfloat16(), rope.rope_table(torch.arange(257), rotary_dim, THETA)
    found = rope.apply_rope(x, *table, interleaved=True)
    apart = rope.apply_rope(torch.cat([pairs_apart(x[..., :rotary_dim]), x[..., rotary_dim:]], -1), *table)
    same_bits(pairs_apart(found[..., :rotary_dim]), apart[..., :rotary_dim], "the same angles on the same pairs")
    same_bits(found[..., rotary_dim:], x[..., rotary_dim:], "untouched channels")
    assert not bit_equal(found, rope.apply_rope(x, *table))
    batch_invariant(lambda x, *t: rope.apply_rope(x, *t, interleaved=True), x, *table, what="apply_rope")
    wide = bf16_values(257, 3, 48).bfloat16()
    one = rope.apply_rope(wide[..., 16:], *table, interleaved=True)
    same_bits(one, rope.apply_rope(wide[..., 16:].contiguous(), *table, interleaved=True), "strided view")


def test_a_non_finite_pair_stays_where_it_is():
    x, table = bf16_values(3, 2, 16).bfloat16(), rope.rope_table(torch.arange(1, 4), 16, THETA)
    clean = rope.apply_rope(x, *table, interleaved=True)
    x[1, 0, 4] = float("nan")
    found = rope.apply_rope(x, *table, interleaved=True)
    reached = as_bits(found) != as_bits(clean)
    assert found[1, 0, 4:6].isnan().all() and reached.sum() == 2


def test_odd_rotary_dim_is_refused():
    with pytest.raises(ContractError, match="rotary_dim 7"):
        rope.rope_table(torch.arange(2), 7, THETA)


def test_gradient():
    table = rope.rope_table(torch.arange(9), 16, THETA)
    gradients_close(lambda x: rope.apply_rope(x, *table), lambda x: rotated(x, *(t.double() for t in table)), (bf16_values(9, 2, 24).bfloat16(),))


def test_interleaved_gradient():
    table = rope.rope_table(torch.arange(9), 16, THETA)

    def expected(x):
        apart = rotated(pairs_apart(x), *(t.double() for t in table))
        return torch.stack(apart.chunk(2, -1), -1).flatten(-2)

    gradients_close(lambda x: rope.apply_rope(x, *table, interleaved=True), expected, (bf16_values(9, 2, 16).bfloat16(),))
