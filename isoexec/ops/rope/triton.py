"""Rotary position embedding in Triton. Table and rotation round step by step as the CPU backend does, so they give its bits."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl

from isoexec.ops._core import math as reference
from isoexec.ops._core.rows import power_of_two, row_offset, rows_of
from isoexec.ops._core.triton_math import COMPILE
from isoexec.ops.rope.reference import _inverse_frequencies

# The CPU backend's series and its three parts of pi / 2.
_TWO_OVER_PI = tl.constexpr(2.0 / math.pi)
_PIO2 = tl.constexpr(reference._PIO2)
_SIN_TERMS = tl.constexpr(tuple(reference._SIN_TERMS))
_COS_TERMS = tl.constexpr(tuple(reference._COS_TERMS))
_NEAREST = tl.constexpr(1.5 * 2.0**52)  # added and subtracted, it leaves the nearest integer of a small fp64, ties to even


@triton.jit
def _horner(terms: tl.constexpr, N: tl.constexpr, x):
    value = x * 0.0 + terms[0]
    for i in tl.static_range(1, N):
        value = value * x + terms[i]
    return value


@triton.jit
def table_kernel(positions, frequencies, cos_out, sin_out, size, HALF: tl.constexpr, BLOCK: tl.constexpr, SINES: tl.constexpr,
                 COSINES: tl.constexpr):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    position = tl.load(positions + at // HALF, mask=here, other=0).to(tl.float32)
    # The angle is one fp32 product; from here on fp64, then one rounding.
    y = (position * tl.load(frequencies + at % HALF, mask=here, other=0.0)).to(tl.float64)
    n = (y * _TWO_OVER_PI + _NEAREST) - _NEAREST
    r = y - n * _PIO2[0]
    r = (r - n * _PIO2[1]) - n * _PIO2[2]
    square = r * r
    sine = _horner(_SIN_TERMS, SINES, square) * r
    cosine = _horner(_COS_TERMS, COSINES, square)
    quadrant = n.to(tl.int64)
    swap = (quadrant & 1) == 1
    cos = tl.where(swap, sine, cosine)
    sin = tl.where(swap, cosine, sine)
    cos = tl.where(((quadrant + 1) & 2) == 2, -cos, cos)
    sin = tl.where((quadrant & 2) == 2, -sin, sin)
    tl.store(cos_out + at, cos.to(tl.float32), mask=here)
    tl.store(sin_out + at, sin.to(tl.float32), mask=here)


@triton.jit
def rotate_kernel(x, cos, sin, y, count, inner, outer, step, heads, K: tl.constexpr, N: tl.constexpr, HALF: tl.constexpr,
                  R: tl.constexpr, BACK: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """R heads per program. ``BACK``: by minus the angle."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, N)[None, :]
    here = (row < count)[:, None] & (c < K)
    source = x + row_offset(row, inner, outer, step)[:, None]
    v = tl.load(source + c, mask=here, other=0.0)
    turns = here & (c < 2 * HALF)
    if INTERLEAVED:
        first = (c & 1) == 0
        partner_at, angle_at = c ^ 1, c >> 1
    else:
        first = c < HALF
        partner_at, angle_at = tl.where(first, c + HALF, c - HALF), tl.where(first, c, c - HALF)
    partner = tl.load(source + partner_at, mask=turns, other=0.0).to(tl.float32)
    angle = (row // heads).to(tl.int64)[:, None] * HALF + angle_at
    a = v.to(tl.float32) * tl.load(cos + angle, mask=turns, other=0.0)
    b = partner * tl.load(sin + angle, mask=turns, other=0.0)
    rotated = tl.where(first, a + b, a - b) if BACK else tl.where(first, a - b, a + b)
    rotated = rotated.to(y.dtype.element_ty)
    tl.store(y + row.to(tl.int64)[:, None] * K + c, tl.where(turns, rotated, v), mask=here)


@functools.lru_cache(maxsize=64)
def _frequencies(rotary_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(_inverse_frequencies(rotary_dim, theta), dtype=torch.float64).to(torch.float32).to(device)


def rope_table(positions, rotary_dim, theta):
    frequencies = _frequencies(int(rotary_dim), float(theta), positions.device)
    half = int(rotary_dim) // 2
    cos, sin = (torch.empty(*positions.shape, half, dtype=torch.float32, device=positions.device) for _ in range(2))
    if cos.numel():
        table_kernel[triton.cdiv(cos.numel(), 256),](
            positions.contiguous(), frequencies, cos, sin, cos.numel(), half, BLOCK=256, SINES=len(reference._SIN_TERMS),
            COSINES=len(reference._COS_TERMS), num_warps=4, **COMPILE,
        )  # fmt: skip
    return cos, sin


def _rotate(x, cos, sin, back, interleaved):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        xs, (heads, K) = rows_of(x), x.shape[-2:]
        N = power_of_two(K)
        R = max(2048 // N, 1)
        rotate_kernel[triton.cdiv(xs.count, R),](
            xs.x, cos, sin, y, xs.count, *xs.address, heads, K, N, cos.shape[-1], R, BACK=back, INTERLEAVED=interleaved, num_warps=4,
            **COMPILE,
        )  # fmt: skip
    return y


class _ApplyRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, False, interleaved)

    @staticmethod
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, True, ctx.interleaved), None, None, None


def apply_rope(x, cos, sin, *, interleaved=False):
    return _ApplyRope.apply(x, cos.contiguous(), sin.contiguous(), interleaved)
