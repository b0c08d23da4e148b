"""Digest of a tensor's bits that does not depend on who holds which part: a sum of mixed (global index, bits) pairs.

Each element's global index and bit pattern are packed into one 64-bit word, which no other (index, bits) of the tensor shares; a bijective
64-bit mix spreads it; the words are added modulo 2^64. Integer additions commute, so shards, strides and the order of work move nothing.
Every step is an integer op on the tensor's own device; what leaves it is one number. Mix: the finaliser of splitmix64 (Steele, Lea and
Flood, 2014).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from isoexec.contract import ContractError
from isoexec.contract.manifest import TensorDigest

#: Elements at a time, by device type: words of 8 bytes that stay in a CPU's cache; on a GPU few launches, and temporaries of 128 MiB.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
#: Bytes of a GPU's tensors that are kept for one launch: some may be copies.
_HELD = 1 << 30
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROUNDS = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))  # the multipliers as signed 64-bit integers
_LAST_SHIFT = 31
_names: dict[torch.dtype, str] = {}
_SALT = -0x61C8864680B583EB


def tensor_digest(part: torch.Tensor, shape=None, offsets=None) -> TensorDigest:
    """Digest of a tensor, or of a rectangular part of one.

    Args:
        part: any dtype of at most 4 bytes, or an integer or float of 8; any strides.
        shape: of the whole tensor; None: ``part`` is the whole.
        offsets: index of ``part``'s first element in each dimension of the whole; None: zeros.

    Raises:
        ContractError: the part does not lie within the whole, or the tensor is too large for an index and the bits to share a word.
    """
    shape = tuple(part.shape if shape is None else shape)
    offsets = (0,) * part.dim() if offsets is None else tuple(offsets)
    if len(shape) != part.dim() or len(offsets) != part.dim() or any(o < 0 or o + n > s for o, n, s in zip(offsets, part.shape, shape)):
        raise ContractError(
            f"weights: a part {list(part.shape)} at {list(offsets)} does not lie within a tensor {list(shape)}; check the layout"
        )
    dtype, strides = _dtype_of(part, math.prod(shape)), _strides(shape)
    total = int(_total(part.detach(), strides, sum(o * s for o, s in zip(offsets, strides)))) if part.numel() else 0
    return TensorDigest(shape, dtype, total % (1 << 64), part.numel())


def tensors_digest(tensors) -> dict[str, TensorDigest]:
    """Digests of whole tensors, from (name, tensor) pairs or a dict."""
    return dict(begin_digests(tensors.items() if hasattr(tensors, "items") else tensors).result())


class PendingDigests(NamedTuple):
    """Digests that a device may still be computing."""

    named: list[tuple[str, tuple[int, ...], str, int, torch.device | None]]
    """Name, shape, dtype and elements of each tensor, and where its total is computed; None: it has no elements."""
    totals: dict[torch.device, list[torch.Tensor]]
    """[n] int64 each: the totals of a device in the order of the names."""

    def result(self) -> list[tuple[str, TensorDigest]]:
        """Digests in the order of the tensors, which may repeat a name; waits for each device once."""
        numbers = {device: iter(torch.cat(found).tolist()) for device, found in self.totals.items()}
        return [
            (name, TensorDigest(shape, dtype, 0 if device is None else next(numbers[device]) % (1 << 64), elements))
            for name, shape, dtype, elements, device in self.named
        ]


def begin_digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> PendingDigests:
    """Launch the digests of whole tensors without waiting for a device.

    Args:
        tensors: (name, tensor); one need not outlive its turn, and must not be written before the device has done what was launched.
    """
    named, totals = [], {}
    held, bytes_ = [], 0  # tensors of a GPU that one launch will digest
    for name, tensor in tensors:
        shape, elements = tuple(tensor.shape), tensor.numel()
        device = tensor.device if elements else None
        named.append((name, shape, _dtype_of(tensor, elements), elements, device))
        if device is None:
            continue
        if device.type != "cuda":
            totals.setdefault(device, []).append(_total(tensor.detach(), _strides(shape), 0).view(1))
            continue
        if held and (held[0].device != device or bytes_ > _HELD):
            totals.setdefault(held[0].device, []).append(_whole_totals(held))
            held, bytes_ = [], 0
        held.append(tensor.contiguous())
        bytes_ += elements * tensor.element_size()
    if held:
        totals.setdefault(held[0].device, []).append(_whole_totals(held))
    return PendingDigests(named, totals)


@torch.no_grad()
def _whole_totals(tensors: list[torch.Tensor]) -> torch.Tensor:
    from isoexec.ops._core.triton_digest import whole_sums

    with torch.cuda.device(tensors[0].device):
        return whole_sums(tensors)


def _dtype_of(part: torch.Tensor, elements: int) -> str:
    """Name of the dtype of a part of a tensor that has ``elements``.

    Raises:
        ContractError: elements of that dtype, or so many, have no place in the digest's words.
    """
    dtype = _names.get(part.dtype) or _names.setdefault(part.dtype, str(part.dtype).removeprefix("torch."))
    size = part.element_size()
    if part.dtype.is_complex:
        raise ContractError(f"weights: expected real numbers, found {dtype}")
    if elements * (2 if size == 8 else 1) > 1 << (64 - 8 * min(size, 4)):
        raise ContractError(
            f"weights: a tensor of {elements} {dtype} has too many elements for this digest; digest it in parts of a leading dimension"
        )
    return dtype


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Distance of neighbours in each dimension of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return strides


def _total(part: torch.Tensor, strides: list[int], first: int) -> torch.Tensor:
    """:func:`_sum`; on a GPU by one kernel, where each ``part[i]`` is contiguous in the whole."""
    whole_rows = all(strides[d] == math.prod(part.shape[d + 1 :]) for d in range(1, part.dim()))
    if not part.is_cuda or not whole_rows:
        return _sum(part, strides, first)
    from isoexec.ops._core.triton_digest import part_sum

    columns, stride = math.prod(part.shape[1:]), strides[0]
    if part.dtype == torch.bool:
        part = part.to(torch.uint8)
    halves = 2 if part.element_size() == 8 else 1  # low word first
    bits = part.contiguous().view(-1).view(_INTEGERS[part.element_size() // halves])
    return part_sum(bits, columns * halves, stride * halves, first * halves)


def _sum(part: torch.Tensor, strides: list[int], first: int) -> torch.Tensor:
    """Sum of the mixed words of ``part``, an int64 scalar on its device; recursion over the leading dimension bounds the temporaries."""
    chunk = _CHUNK[part.device.type]
    if part.numel() > chunk and part.dim() and part.shape[0] > 1:
        rows = max(1, chunk // (part.numel() // part.shape[0]))
        sums = [_sum(piece, strides, first + i * rows * strides[0]) for i, piece in enumerate(part.split(rows))]
        return torch.stack(sums).sum()  # wraps, as unsigned words would
    if part.numel() > chunk:  # one row that is longer than a chunk
        return _sum(part[0], strides[1:], first)
    index = torch.full((), first, dtype=torch.int64, device=part.device)
    for d, (length, stride) in enumerate(zip(part.shape, strides)):
        steps = torch.arange(length, dtype=torch.int64, device=part.device) * stride
        index = index + steps.view(-1, *[1] * (part.dim() - d - 1))
    size = part.element_size()
    if size == 8:  # two halves, low word first
        halves = part.contiguous().view(-1).view(torch.int32).view(*part.shape, 2)
        index = torch.stack((2 * index, 2 * index + 1), -1)
        return _mixed(index, halves, 32)
    if part.dtype == torch.bool:
        part = part.to(torch.uint8)
    return _mixed(index, part.view(_INTEGERS[size]), 8 * size)


def _mixed(index: torch.Tensor, integers: torch.Tensor, width: int) -> torch.Tensor:
    word = (index << width).add_(integers.to(torch.int64).bitwise_and_((1 << width) - 1)).add_(_SALT)  # wraps, as unsigned words would
    for shift, factor in _ROUNDS:
        word.bitwise_xor_(_unsigned_shift(word, shift)).mul_(factor)
    word.bitwise_xor_(_unsigned_shift(word, _LAST_SHIFT))
    return word.sum()


def _unsigned_shift(word: torch.Tensor, shift: int) -> torch.Tensor:
    return (word >> shift).bitwise_and_((1 << (64 - shift)) - 1)
