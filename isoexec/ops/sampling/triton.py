"""Drawing a token on a GPU. A library's argmax leaves ties open; here one program reads a row in ascending order and keeps the first best."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.ops._core.triton_math import COMPILE

_TILE = 4096
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def argmax_kernel(values, noise, out, V, stride, RACE: tl.constexpr, TILE: tl.constexpr):
    """Lowest index of the largest value of a row (NaN counts as the largest); ``RACE``: of exp(value) / noise."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([TILE], _LOWEST, dtype=tl.float32)
    at = tl.full([TILE], 0, dtype=tl.int32)
    for first in range(0, V, TILE):
        c = first + tl.arange(0, TILE)
        x = tl.load(values + row * stride + c, mask=c < V, other=_LOWEST)
        if RACE:
            e = tl.load(noise + row * V + c, mask=c < V, other=1.0)
            p = tl.exp(x)
            x = tl.where(p == 0.0, 0.0, tl.div_rn(p, e))  # what has no probability never wins, whatever its noise
        x = tl.where(x == x, x, float("inf"))
        x = tl.where(c < V, x, _LOWEST)
        at = tl.where((x > best) | (first == 0), c, at)  # a later equal does not replace an earlier one
        best = tl.where((x > best) | (first == 0), x, best)
    peak = tl.max(best, 0)
    tl.store(out + row, tl.min(tl.where(best == peak, at, V), 0).to(tl.int64))


def _argmax(values, noise):
    values = values if values.stride(-1) == 1 else values.contiguous()
    T, V = values.shape
    out = torch.empty(T, dtype=torch.int64, device=values.device)
    if T:
        argmax_kernel[T,](values, values if noise is None else noise, out, V, values.stride(0), noise is not None, _TILE, num_warps=8, **COMPILE)
    return out


def draw(logprobs, generators):
    noise = torch.ones(logprobs.shape, dtype=torch.float32, device=logprobs.device)
    for row, generator in enumerate(generators):
        if generator is not None:
            noise[row].exponential_(generator=generator)
    return _argmax(logprobs, noise)


def first_maximum(logits):
    return _argmax(logits, None)
