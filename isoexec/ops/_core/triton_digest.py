"""Digests of rows and of weights on a GPU, one pass over the bytes; the pieces, keys and mix of the torch forms, so the same numbers.

Everything is added modulo 2^64, which commutes: neither tiles nor the order of programs move a bit. Nothing is read back, so the kernels
can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_BLOCK = 1024
_PIECES = 2048
#: Pieces of a row beyond which its sum is cut among programs, and into how many parts at most.
_WIDE, _PARTS = 1 << 15, 64
#: Rows from which on a program takes several with the same keys: making a key is most of the work. Their number, pieces at once, and warps.
_MANY, _SHARING = 512, (8, 512, 4)
#: Pieces that the compiler may take for whole loads, and tensors of one launch.
_UNIT, _TOGETHER = 16, 8
#: Most programs of :func:`part_sum`: some for each multiprocessor of any GPU.
_PROGRAMS = 1024
#: Elements of a program of :func:`whole_sums`: so many programs that none is waited for alone.
_SEGMENT = 1 << 16


@triton.jit
def mix(word):
    """The finaliser of splitmix64 over uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _keys(at, STEP: tl.constexpr):
    """Odd keys of places: for each word of two pieces one and its multiple."""
    key = mix(((at // 2).to(tl.uint64) + 1) * STEP) | 1
    return tl.where(at % 2 == 1, key * STEP, key)


@triton.jit
def _number(pieces):
    """Signed 16-bit integers as 64-bit words."""
    return pieces.to(tl.int64).to(tl.uint64, bitcast=True)


# A row of one piece is no kernel of its own: its places would be known to fit 16 bits, and an H200 got another sum from that form.
@triton.jit(do_not_specialize=["units"])
def _rows_kernel(pieces, out, length, units, stride, programs, UNIT: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """A program's share of the sum over a row of units * UNIT pieces, each times the key of its place."""
    n = units * UNIT  # tells the compiler that whole units are read
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for start in range(part * BLOCK, n, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += _keys(at, STEP) * _number(tl.load(pieces + row * stride + at, mask=at < n, other=0))
    tl.store(out + row * programs + part, tl.sum(total, 0).to(tl.int64, bitcast=True) + tl.where(part == 0, length, 0))


@triton.jit(do_not_specialize=["units"])
def _many_rows_kernel(pieces, out, length, T, units, stride, programs, UNIT: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
                      BLOCK: tl.constexpr):  # fmt: skip
    """:func:`_rows_kernel` for ROWS rows, which share the keys."""
    n = units * UNIT
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    total = tl.zeros([ROWS, BLOCK], dtype=tl.uint64)
    for start in range(part * BLOCK, n, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (rows[:, None] < T) & (at[None, :] < n)
        total += _keys(at, STEP)[None, :] * _number(tl.load(pieces + rows[:, None] * stride + at[None, :], mask=inside, other=0))
    found = tl.sum(total, 1).to(tl.int64, bitcast=True) + tl.where(part == 0, length, 0)
    tl.store(out + rows * programs + part, found, mask=rows < T)


@triton.jit(do_not_specialize=[f"{name}{i}" for name in "ons" for i in range(8)])
def _several_kernel(p0, p1, p2, p3, p4, p5, p6, p7, o0, o1, o2, o3, o4, o5, o6, o7, n0, n1, n2, n3, n4, n5, n6, n7,
                    s0, s1, s2, s3, s4, s5, s6, s7, UNIT: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One row of one of up to eight tensors, whose rows have n * UNIT pieces s * UNIT apart."""
    which = tl.program_id(1)
    p, o, n, s = p0, o0, n0, s0
    if which == 1:
        p, o, n, s = p1, o1, n1, s1
    if which == 2:
        p, o, n, s = p2, o2, n2, s2
    if which == 3:
        p, o, n, s = p3, o3, n3, s3
    if which == 4:
        p, o, n, s = p4, o4, n4, s4
    if which == 5:
        p, o, n, s = p5, o5, n5, s5
    if which == 6:
        p, o, n, s = p6, o6, n6, s6
    if which == 7:
        p, o, n, s = p7, o7, n7, s7
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for start in range(0, n * UNIT, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += _keys(at, STEP) * _number(tl.load(p + row * s * UNIT + at, mask=at < n * UNIT, other=0))
    length = mix((n * UNIT * 2).to(tl.uint64))
    tl.store(o + row, (tl.sum(total, 0) + length).to(tl.int64, bitcast=True))


@triton.jit
def _columns_kernel(words, out, W, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """One row of W words: the sum of its mixed words, all with one key."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for start in range(0, W, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = tl.load(words + row * W + at, mask=at < W, other=0)
        if word.dtype == tl.int16:  # a pattern of 16 bits, not a number
            word = word.to(tl.uint16, bitcast=True)
        word = word.to(tl.int64).to(tl.uint64, bitcast=True)
        total += tl.where(at < W, mix(word + STEP), 0)
    tl.store(out + row, tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit
def _mixed(at, pattern, WIDTH: tl.constexpr, SALT: tl.constexpr):
    """Mixed words of elements of WIDTH bits at the places ``at`` of the whole."""
    word = (at.to(tl.uint64, bitcast=True) << WIDTH) + (pattern.to(tl.int64).to(tl.uint64, bitcast=True) & ((1 << WIDTH) - 1))
    return mix(word + SALT)


@triton.jit
def _part_kernel(bits, out, count, columns, stride, first, programs, PACKED: tl.constexpr, WIDTH: tl.constexpr,
                 SALT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A program's share of the sum over ``count`` elements, in rows of ``columns`` whose first ones are ``stride`` apart in the whole."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for start in range(program * BLOCK, count, programs * BLOCK):
        at = (start + tl.arange(0, BLOCK)).to(tl.int64)
        inside = at < count
        if PACKED:  # rows without a gap: no division of 64 bits for each element
            index = first + at
        else:
            index = first + at // columns * stride + at % columns
        pattern = tl.load(bits + at, mask=inside, other=0)
        total += tl.where(inside, _mixed(index, pattern, WIDTH, SALT), 0)
    tl.store(out + program, tl.sum(total, 0).to(tl.int64, bitcast=True))


@triton.jit
def _segments_kernel(table, out, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, SALT: tl.constexpr, BLOCK: tl.constexpr):
    """Adds a segment's sum to that of its tensor; ``table`` [programs, 4]: address, first index, elements, tensor."""
    entry = table + tl.program_id(0).to(tl.int64) * 4
    address = tl.load(entry)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2).to(tl.int32)
    element: tl.constexpr = tl.int8 if WIDTH == 8 else tl.int16 if WIDTH == 16 else tl.int32
    bits = address.to(tl.pointer_type(element))
    if ALIGNED:
        bits = tl.multiple_of(bits, 16)
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    whole = count - count % BLOCK
    for start in range(0, whole, BLOCK):  # without a mask, so in loads of 16 bytes
        at = start + tl.arange(0, BLOCK)
        total += _mixed(first + at, tl.load(bits + at), WIDTH, SALT)
    if whole < count:
        at = whole + tl.arange(0, BLOCK)
        word = _mixed(first + at, tl.load(bits + at, mask=at < count, other=0), WIDTH, SALT)
        total += tl.where(at < count, word, 0)
    tl.atomic_add(out + tl.load(entry + 3), tl.sum(total, 0).to(tl.int64, bitcast=True), sem="relaxed")


def row_sums(pieces: torch.Tensor, length: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T] int64, in ``out`` if given: sum of the pieces of each row times the keys of their places, plus ``length``.

    Args:
        pieces: [T, n] int16, whose rows are contiguous.
    """
    T, n = pieces.shape
    out = torch.empty(T, dtype=torch.int64, device=pieces.device) if out is None else out
    if not T or not n:
        return out.fill_(length)
    # A row of a vocabulary would keep one program busy for longer than its product took.
    programs = min(triton.cdiv(n, _PIECES), _PARTS) if n > _WIDE else 1
    found = out if programs == 1 else torch.empty(T, programs, dtype=torch.int64, device=pieces.device)
    unit = _UNIT if n % _UNIT == 0 else 1
    if T < _MANY:
        _rows_kernel[(T, programs)](
            pieces, found, length, n // unit, pieces.stride(0), programs, UNIT=unit, STEP=_STEP, BLOCK=_PIECES, num_warps=4
        )
    else:
        rows, block, warps = _SHARING
        _many_rows_kernel[(triton.cdiv(T, rows), programs)](
            pieces, found, length, T, n // unit, pieces.stride(0), programs, UNIT=unit, STEP=_STEP, ROWS=rows, BLOCK=block, num_warps=warps
        )
    if programs > 1:
        torch.sum(found, 1, out=out)
    return out


def several_row_sums(jobs: list[tuple[torch.Tensor, int, torch.Tensor]]) -> None:
    """:func:`row_sums` of several (pieces, length, out) of equally many rows, of elements of two bytes or more, in few launches."""
    together = []
    for pieces, length, out in jobs:
        if _narrow_and_aligned(pieces):
            together.append((pieces, out))
        else:
            row_sums(pieces, length, out)
    for at in range(0, len(together), _TOGETHER):
        group = together[at : at + _TOGETHER]
        T, filled = group[0][0].shape[0], [group[min(i, len(group) - 1)] for i in range(_TOGETHER)]
        if T:
            _several_kernel[(T, len(group))](
                *(pieces for pieces, _ in filled), *(out for _, out in filled), *(pieces.shape[1] // _UNIT for pieces, _ in filled),
                *(pieces.stride(0) // _UNIT for pieces, _ in filled), UNIT=_UNIT, STEP=_STEP, BLOCK=_PIECES, num_warps=4,
            )  # fmt: skip


def _narrow_and_aligned(pieces: torch.Tensor) -> bool:
    """Whether a row is one program's work, in loads of 16 bytes."""
    n, stride = pieces.shape[1], pieces.stride(0)
    return 0 < n <= _WIDE and n % _UNIT == 0 and stride % _UNIT == 0 and pieces.data_ptr() % 16 == 0


def column_sums(words: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """[T] int64, in ``out`` if given: sum of the mixed words of each row of ``words`` [T, W], contiguous integers, 16-bit ones unsigned."""
    out = torch.empty(words.shape[0], dtype=torch.int64, device=words.device) if out is None else out
    if words.shape[0]:
        _columns_kernel[(words.shape[0],)](words, out, words.shape[1], STEP=_STEP, BLOCK=_BLOCK, num_warps=4)
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


def whole_sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[N] int64: :func:`part_sum` of each of N whole tensors, in one launch for each width of elements; nothing is waited for.

    Args:
        tensors: contiguous, of one device, elements of 1, 2, 4 or 8 bytes (8: two of 4, the low one first).
    """
    out = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    kinds: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}
    for slot, tensor in enumerate(tensors):
        address, size = tensor.data_ptr(), tensor.element_size()
        count = tensor.numel() * (2 if size == 8 else 1)
        kinds.setdefault((min(size, 4), address % 16 == 0), []).append((address, count, slot))
    for (size, aligned), found in kinds.items():
        table = _segments(torch.tensor(found), size)
        if out.is_cuda:
            table = table.pin_memory().to(out.device, non_blocking=True)
        _segments_kernel[(len(table),)](table, out, WIDTH=8 * size, ALIGNED=aligned, SALT=_STEP, BLOCK=_BLOCK, num_warps=4)
    return out


def _segments(tensors: torch.Tensor, size: int) -> torch.Tensor:
    """Table of :func:`_segments_kernel` of [N, 3] addresses, numbers of elements of ``size`` bytes, and slots in the result."""
    address, count, slot = tensors.unbind(1)
    segments = (count + _SEGMENT - 1) // _SEGMENT
    which = torch.repeat_interleave(segments)
    first = (torch.arange(len(which)) - (segments.cumsum(0) - segments)[which]) * _SEGMENT
    return torch.stack((address[which] + first * size, first, (count[which] - first).clamp(max=_SEGMENT), slot[which]), 1)
