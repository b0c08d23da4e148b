"""Digests of rows and of weights on a GPU, one pass over the bytes; the words, keys and mix of the torch forms, so the same numbers.

A mixed word is added modulo 2^64, which commutes: neither tiles nor the order of programs move a bit. Nothing is read back, so the kernels
can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_BLOCK = 1024
#: Most programs of :func:`part_sum`: some for each multiprocessor of any GPU.
_PROGRAMS = 1024


@triton.jit
def mix(word):
    """The finaliser of splitmix64 over uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _rows_kernel(words, out, length, W, STEP: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr):
    """One row of W words: the sum of its mixed words, each with the key of its place, or all with the first."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for start in range(0, W, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = tl.load(words + row * W + at, mask=at < W, other=0)
        if word.dtype == tl.int16:  # a pattern of 16 bits, not a number
            word = word.to(tl.uint16, bitcast=True)
        word = word.to(tl.int64).to(tl.uint64, bitcast=True)
        key = (at.to(tl.uint64) + 1) * STEP if PLACED else STEP
        total += tl.where(at < W, mix(word + key), 0)
    tl.store(out + row, tl.sum(total, 0).to(tl.int64, bitcast=True) + length)


@triton.jit
def _part_kernel(bits, out, count, columns, stride, first, programs, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                 SALT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program's share of the sum over ``count`` elements, in rows of ``columns`` whose first ones are ``stride`` apart in the whole."""
    program = tl.program_id(0).to(tl.int64)
    mask_of_bits: tl.constexpr = (1 << WIDTH) - 1
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for start in range(program * BLOCK, count, programs * BLOCK):
        at = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = at < count
        if PACKED:  # rows without a gap: no division of 64 bits for each element
            index = (first + at).to(tl.uint64, bitcast=True)
        else:
            index = (first + at // columns * stride + at % columns).to(tl.uint64, bitcast=True)
        pattern = tl.load(bits + at, mask=inside, other=0).to(tl.int64).to(tl.uint64, bitcast=True) & mask_of_bits
        total += tl.where(inside, mix((index << WIDTH) + pattern + SALT), 0)
    tl.store(out + program, tl.sum(total, 0).to(tl.int64, bitcast=True))


def row_sums(words: torch.Tensor, length: int, *, placed: bool) -> torch.Tensor:
    """[T] int64: sum of the mixed words of each row of ``words`` [T, W], contiguous integers, plus ``length``.

    Args:
        placed: a word's key is of its place in the row; else every key is that of the first place. 16-bit words count as unsigned.
    """
    out = torch.empty(words.shape[0], dtype=torch.int64, device=words.device)
    if words.shape[0]:
        _rows_kernel[(words.shape[0],)](words, out, length, words.shape[1], STEP=_STEP, PLACED=placed, BLOCK=_BLOCK, num_warps=4)
    return out


def part_sum(bits: torch.Tensor, columns: int, stride: int, first: int) -> torch.Tensor:
    """0-dim int64: sum of the mixed (index in the whole, bits) of a part of a tensor.

    Args:
        bits: contiguous integers of 1, 2 or 4 bytes, at least one.
        columns: length of the runs that are contiguous in the whole.
        stride: distance of two runs in the whole, in elements.
        first: index of the part's first element in the whole.
    """
    programs = min(_PROGRAMS, triton.cdiv(bits.numel(), _BLOCK))
    out = torch.empty(programs, dtype=torch.int64, device=bits.device)
    width = 8 * bits.element_size()
    _part_kernel[(programs,)](
        bits, out, bits.numel(), columns, stride, first, programs, PACKED=columns == stride, WIDTH=width, SALT=_STEP, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    return out.sum()
