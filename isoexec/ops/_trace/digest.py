"""Digest of a token's row: a sum of mixed words, so that neither the order of work nor the rows beside it move anything.

The bytes of a row are cut in 64-bit words (the last one filled with zeros). A word plus a key of its place in the row goes through a
bijective mix; the mixed words and the mixed length are added modulo 2^64. So a change within one word is always seen, and one of several
words but for a chance of about 2^-64. A product's columns that a runtime stores in an order of its own are digested without places
(:func:`column_digests`). Integer ops on the tensor's own device, nothing is transferred.
"""

from __future__ import annotations

import functools

import torch

_ROUNDS, _LAST = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)), 31  # the multipliers as signed integers
_STEP = -0x61C8864680B583EB  # 2^64 / golden ratio, odd: keys of places
_WORDS_AT_ONCE = 1 << 15  # temporaries stay in cache on a CPU
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mix(words: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit words, in place.

    A shorter mix would not do: where two signs flip, whose bit is the highest of a word, the sums of some rows would be equal.
    """
    for shift, factor in _ROUNDS:
        words.bitwise_xor_(_shifted(words, shift)).mul_(factor)
    return words.bitwise_xor_(_shifted(words, _LAST))


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right that fills with zeros."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def row_digests(x: torch.Tensor) -> torch.Tensor:
    """Digests of the rows of ``x`` [T, ...] of any dtype: [T] int64."""
    words = _words(x)
    if words.is_cuda:
        from isoexec.ops._core.triton_digest import row_sums

        return row_sums(words, _length(x), placed=True)
    keys = _keys(words.shape[1], words.device)
    rows = max(1, _WORDS_AT_ONCE // max(words.shape[1], 1))
    if words.shape[0] <= rows:
        return mix(words + keys).sum(1).add_(_length(x))
    return torch.cat([mix(part + keys).sum(1) for part in words.split(rows)]).add_(_length(x))


def column_digests(x: torch.Tensor) -> torch.Tensor:
    """Digests of the rows of ``x`` [T, N] whatever the order of its columns: [T] int64. Those of parts of the columns add up."""
    bits = x.detach().contiguous().view(_INTEGERS[x.element_size()])
    if bits.is_cuda:
        from isoexec.ops._core.triton_digest import row_sums

        return row_sums(bits, 0, placed=False)
    if x.element_size() != 2:
        return mix(bits.to(torch.int64).add_(_STEP)).sum(1)
    table = _table(x.device)
    rows = max(1, _WORDS_AT_ONCE // max(x.shape[1], 1))
    parts = [table.index_select(0, (part.to(torch.int32) & 0xFFFF).view(-1)).view(part.shape).sum(1) for part in bits.split(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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


def _words(x: torch.Tensor) -> torch.Tensor:
    """[T, words] int64 view of the rows of ``x``, copied only where they do not lie so."""
    x = x.detach()
    if x.dtype == torch.bool:
        x = x.to(torch.uint8)
    x = x.reshape(x.shape[0], x.shape[1:].numel())
    per_word = 8 // x.element_size()
    words = -(-x.shape[1] // per_word)
    if x.shape[1] % per_word:
        filled = x.new_zeros(x.shape[0], words * per_word)
        filled[:, : x.shape[1]] = x
        x = filled
    # Flat first: the stride of a dimension of length 1 may be anything, and a view as wider words reads it.
    return x.contiguous().view(-1).view(torch.int64).view(x.shape[0], words)


def _length(x: torch.Tensor) -> int:
    """Mixed number of bytes of a row, as a signed 64-bit integer."""
    word = x[:1].numel() * x.element_size()
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor % (1 << 64)
    word ^= word >> _LAST
    return word - (1 << 64) if word >> 63 else word


@functools.lru_cache(maxsize=256)
def _keys(words: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, words + 1, dtype=torch.int64, device=device) * _STEP


@functools.lru_cache(maxsize=8)
def _table(device: torch.device) -> torch.Tensor:
    """Mixed words of every 16-bit pattern."""
    with torch.inference_mode(False):
        return mix(torch.arange(1 << 16, dtype=torch.int64, device=device).add_(_STEP))
