"""Digest of a token's row: a sum of keyed pieces, so that neither the order of work nor the rows beside it move anything.

The bytes of a row are cut in signed integers of 16 bits (bytes count one each). A piece is multiplied by an odd 64-bit key of its place;
the products and the mixed length are added modulo 2^64 (multilinear hashing: Lemire and Kaser, "Strongly universal string hashing is
fast", 2014). So a change of one element of at most 32 bits is always seen: of one piece since its key is odd, of both pieces of a word
since the second's key is the first's times 2^64 / golden ratio, whose small multiples keep away from small numbers. Changes of several
are missed with a probability of at most 2^-48, where all of them are in the highest bit of a piece, and mostly of 2^-63. A product's
columns that a runtime stores in an order of its own are digested without places (:func:`column_digests`). Integer ops on the tensor's own
device, nothing is transferred.
"""

from __future__ import annotations

import functools

import torch

_ROUNDS, _LAST = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)), 31  # the multipliers as signed integers
_STEP = -0x61C8864680B583EB  # 2^64 / golden ratio, odd
_PIECES_AT_ONCE = 1 << 16  # temporaries stay in cache on a CPU
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit words, in place."""
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(factor)
    return words.bitwise_xor_(_shifted(words, _LAST))


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right that fills with zeros."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def row_digests(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Digests of the rows of ``x`` [T, ...] of any dtype: [T] int64, in ``out`` where it is given."""
    pieces, length = _pieces(x), _length(x)
    if pieces.is_cuda:
        from isoexec.ops._core.triton_digest import row_sums

        return row_sums(pieces, length, out)
    T, n = pieces.shape
    out = torch.empty(T, dtype=torch.int64) if out is None else out
    keys, rows = _keys(n, pieces.device), max(1, _PIECES_AT_ONCE // max(n, 1))
    for at in range(0, T, rows):
        torch.mv(pieces[at : at + rows].to(torch.int64), keys, out=out[at : at + rows])  # wraps, as unsigned words would
    return out.add_(length)


def several_row_digests(jobs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """:func:`row_digests` of several (x, out), whose numbers of rows are equal."""
    if any(not x.is_cuda for x, _ in jobs):
        for x, out in jobs:
            row_digests(x, out)
        return
    from isoexec.ops._core.triton_digest import several_row_sums

    several_row_sums([(_pieces(x), _length(x), out) for x, out in jobs if x.element_size() > 1])
    for x, out in jobs:
        if x.element_size() == 1:
            row_digests(x, out)


def column_digests(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Digests of the rows of ``x`` [T, N] whatever the order of its columns: [T] int64. Those of parts of the columns add up."""
    bits = x.detach().contiguous().view(_INTEGERS[x.element_size()])
    if bits.is_cuda:
        from isoexec.ops._core.triton_digest import column_sums

        return column_sums(bits, out)
    if x.element_size() == 2:
        table, rows = _table(x.device), max(1, _PIECES_AT_ONCE // max(x.shape[1], 1))
        parts = [table.index_select(0, (p.to(torch.int32) & 0xFFFF).view(-1)).view(p.shape).sum(1) for p in bits.split(rows)]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        found = mix(bits.to(torch.int64).add_(_STEP)).sum(1)
    return found if out is None else out.copy_(found)


def weight_digest(weight, *, ordered: bool = True) -> torch.Tensor:
    """Digest of a parameter: of the digests of its rows, by place, or with ``ordered=False`` whatever the order of its rows. 0-dim int64.

    Args:
        weight: a tensor, or a sequence of tensors that stands for them stacked.
    """
    if isinstance(weight, (list, tuple)):
        return row_digests(torch.stack([weight_digest(w) for w in weight]).unsqueeze(0))[0]
    if weight.dim() > 2:
        return weight_digest(list(weight))
    digests = row_digests(weight)
    return row_digests(digests.unsqueeze(0))[0] if ordered else mix(digests.add_(_STEP)).sum()


def placed(digests: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Digests [..., T] mixed with the places they are at, int64, ready to be added up."""
    return mix(digests + (places + 1) * _STEP)


def _pieces(x: torch.Tensor) -> torch.Tensor:
    """[T, n] int16 view of the rows of ``x``, whose pieces lie side by side; copied only where they do not."""
    x = x.detach()
    x = x.reshape(x.shape[0], x.shape[1:].numel())
    if x.element_size() == 1:
        return (x if x.dtype == torch.bool else x.view(torch.uint8)).to(torch.int16)
    if x.stride(1) != 1 or x.shape[1] == 1:
        # Flat first: the stride of a dimension of length 1 may be anything, and a view of it as pieces reads it.
        return x.contiguous().view(-1).view(torch.int16).view(x.shape[0], x.shape[1] * (x.element_size() // 2))
    return x.view(torch.int16)


def _length(x: torch.Tensor) -> int:
    """Mixed number of bytes of a row, as a signed 64-bit integer."""
    return _mixed(x.shape[1:].numel() * x.element_size())


@functools.lru_cache(maxsize=1024)
def _mixed(word: int) -> int:
    """:func:`mix` of a small number, without a tensor."""
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor % (1 << 64)
    word ^= word >> _LAST
    return word - (1 << 64) if word >> 63 else word


@functools.lru_cache(maxsize=256)
def _keys(pieces: int, device: torch.device) -> torch.Tensor:
    """Keys of the places of a row, for each word of two pieces one and its multiple."""
    with torch.inference_mode(False):
        first = mix(torch.arange(1, pieces // 2 + 2, dtype=torch.int64, device=device).mul_(_STEP)).bitwise_or_(1)
        return torch.stack((first, first * _STEP), 1).view(-1)[:pieces]


@functools.lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """Mixed words of every 16-bit pattern."""
    with torch.inference_mode(False):
        return mix(torch.arange(1 << 16, dtype=torch.int64, device=device).add_(_STEP))
