"""Drawing a token on a GPU: two launches for all rows, whose noise is made where it is used.

A library's argmax leaves ties open; here a row is read in ascending order and the first best is kept. The noise of a row is Philox
(Salmon et al. 2011) under the key of the row's generator, counted by the generator's offset and the column.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.ops._core.triton_math import COMPILE

_TILE = 4096
#: A row is shared out over so many programs that few rows fill a GPU; an exact maximum has the bits of any split.
_PARTS, _PROGRAMS = 64, 1024
_LOWEST = tl.constexpr(float("-inf"))
#: By how much a draw advances a generator's offset; vLLM takes back the draw of an unfinished prefill by as much.
_OFFSET = 4


@triton.jit
def _exponential(word):
    """Exp(1) of 32 random bits: -log(1 - u), u uniform in (0, 1). Its smallest values are 2^-32 apart, and the quotient takes back the rounding
    of 1 - u, so that a token far out in the tail keeps its probability."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    u = tl.minimum(u, 0.99999994)
    left = 1.0 - u
    return tl.where(left == 1.0, u, -tl.log(left) * (u / (1.0 - left)))


@triton.jit
def parts_kernel(values, keys, peaks, places, V, stride, STEPS, RACE: tl.constexpr, TILE: tl.constexpr):
    """Largest value, and its lowest index, of each part of a row, ``STEPS`` tiles long (NaN counts as the largest); ``RACE``: of
    exp(value) / e, e ~ Exp(1) where the row's ``keys`` (seed, offset, 1), and 1 where they end in 0."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    start = part * STEPS * TILE
    best = tl.full([TILE], _LOWEST, dtype=tl.float32)
    at = start + tl.arange(0, TILE)
    if RACE:
        seed, offset, drawn = tl.load(keys + 3 * row), tl.load(keys + 3 * row + 1), tl.load(keys + 3 * row + 2)
        low, high = offset.to(tl.uint32), (offset >> 32).to(tl.uint32)
    for first in range(start, min(start + STEPS * TILE, V), TILE):
        c = first + tl.arange(0, TILE)
        x = tl.load(values + row * stride + c, mask=c < V, other=_LOWEST)
        if RACE:
            quarter = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)  # a count gives four words
            nought = tl.zeros([TILE // 4], dtype=tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, quarter, low + nought, high + nought, nought)
            word = tl.reshape(tl.join(tl.join(w0, w1), tl.join(w2, w3)), [TILE])
            e = tl.where(drawn == 1, _exponential(word), 1.0)
            p = tl.exp(x)
            x = tl.where(p == 0.0, 0.0, tl.div_rn(p, e))  # what has no probability never wins, whatever its noise
        x = tl.where(x == x, x, float("inf"))
        x = tl.where(c < V, x, _LOWEST)
        at = tl.where(x > best, c, at)  # a later equal does not replace an earlier one
        best = tl.where(x > best, x, best)
    peak = tl.max(best, 0)
    tl.store(peaks + row * parts + part, peak)
    tl.store(places + row * parts + part, tl.min(tl.where(best == peak, at, V), 0))


@triton.jit
def first_of_parts_kernel(peaks, places, out, parts, MOST: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, MOST)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=_LOWEST)
    place = tl.load(places + row * parts + part, mask=part < parts, other=2147483647)
    tl.store(out + row, tl.min(tl.where(peak == tl.max(peak, 0), place, 2147483647), 0).to(tl.int64))


def _argmax(values, keys=None):
    values = values if values.stride(-1) == 1 else values.contiguous()
    (T, V), device = values.shape, values.device
    out = torch.empty(T, dtype=torch.int64, device=device)
    if T:
        tiles = triton.cdiv(V, _TILE)
        steps = triton.cdiv(tiles, min(_PARTS, triton.cdiv(_PROGRAMS, T)))
        parts = triton.cdiv(tiles, steps)
        peaks, places = torch.empty(T, parts, dtype=torch.float32, device=device), torch.empty(T, parts, dtype=torch.int32, device=device)
        race = keys is not None
        parts_kernel[T, parts](values, keys if race else values, peaks, places, V, values.stride(0), steps, race, _TILE, num_warps=8, **COMPILE)
        first_of_parts_kernel[T,](peaks, places, out, parts, _PARTS, num_warps=1, **COMPILE)
    return out


def _key(generator):
    """(seed, offset, 1) of a draw, which the generator will not give again; (0, 0, 0) without a generator."""
    if generator is None:
        return 0, 0, 0
    if generator.device.type == "cpu":  # Triton's interpreter: these have no offset
        return int(torch.randint(1 << 62, (), generator=generator)), 0, 1
    offset, seed = generator.get_offset(), generator.initial_seed()
    generator.set_offset(offset + _OFFSET)
    return seed - (1 << 64) if seed >> 63 else seed, offset, 1


def draw(logprobs, generators):
    on_gpu = logprobs.device.type == "cuda"
    keys = torch.tensor([_key(generator) for generator in generators], dtype=torch.int64, pin_memory=on_gpu).view(-1, 3)
    return _argmax(logprobs, keys.to(logprobs.device, non_blocking=True))


def first_maximum(logits):
    return _argmax(logits)
