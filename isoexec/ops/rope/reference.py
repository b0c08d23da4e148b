"""Rotary position embedding of the CPU backend."""

from __future__ import annotations

import functools

import torch

from isoexec.contract import ContractError
from isoexec.ops._core import math


@functools.lru_cache(maxsize=64)
def _inverse_frequencies(rotary_dim: int, theta: float) -> tuple[float, ...]:
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ContractError(f"rope.rope_table: rotary_dim {rotary_dim} is not a positive even number; check the model's config")
    return tuple(float(theta) ** (-2.0 * i / rotary_dim) for i in range(rotary_dim // 2))


def rope_table(positions, rotary_dim, theta):
    frequencies = torch.tensor(_inverse_frequencies(int(rotary_dim), float(theta)), dtype=torch.float64, device=positions.device)
    angle = positions.to(torch.float32).unsqueeze(-1) * frequencies.to(torch.float32)
    return math.cos_sin(angle)


def _rotate(x, cos, sin, interleaved):
    """fp32 rotation of the leading channels of each head: two products, then one addition, each rounded."""
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turning, rest = x.split((2 * half, x.shape[-1] - 2 * half), -1)
    first, second = (part.float() for part in (turning.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turning.chunk(2, -1)))
    rotated = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    turned = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([turned, rest], -1)


class _ApplyRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, ctx.interleaved), None, None, None


def apply_rope(x, cos, sin, *, interleaved=False):
    return _ApplyRope.apply(x, cos, sin, interleaved)
