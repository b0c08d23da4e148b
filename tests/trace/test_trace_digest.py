"""Digests of rows: what they see, what they do not depend on, and their definition in plain integers."""

import itertools

import pytest
import torch

from isoexec.ops._core.bits import nudge
from isoexec.ops._trace.digest import column_digests, placed, row_digests, weight_digest

WORD = 1 << 64
STEP = 0x9E3779B97F4A7C15


def mixed(word: int) -> int:
    """The finaliser of splitmix64."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> shift)) * factor % WORD
    return word ^ (word >> 31)


def defined(row: bytes, size: int) -> int:
    """The definition, written without torch: of a row of elements of ``size`` bytes."""
    wide = min(size, 2)
    pieces = [int.from_bytes(row[i : i + wide], "little", signed=wide == 2) for i in range(0, len(row), wide)]
    keys = [(mixed((i // 2 + 1) * STEP % WORD) | 1) * (STEP if i % 2 else 1) for i in range(len(pieces))]
    return (sum(piece * key for piece, key in zip(pieces, keys)) + mixed(len(row))) % WORD


DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (1, 3, 8, 130))
def test_the_definition(dtype, width):
    x = (torch.randn(5, width) * 3).to(dtype)
    found = [value % WORD for value in row_digests(x).tolist()]
    assert found == [defined(row.contiguous().view(torch.uint8).numpy().tobytes(), x.element_size()) for row in x]
    into = torch.full((5,), 7)
    assert row_digests(x, into) is into and [value % WORD for value in into.tolist()] == found


def test_a_row_alone_strided_and_in_a_batch():
    wide = torch.randn(700, 3, 40).bfloat16()
    whole = row_digests(wide)
    assert torch.equal(whole, torch.cat([row_digests(row.unsqueeze(0)) for row in wide]))
    assert torch.equal(row_digests(wide[:, 1]), row_digests(wide[:, 1].contiguous()))
    assert torch.equal(row_digests(wide.flip(0)), whole.flip(0))
    qkv = torch.randn(1, 37).bfloat16()[:, :33]  # one row, whose stride is odd
    assert int(row_digests(qkv)) == int(row_digests(qkv.clone(memory_format=torch.contiguous_format)))
    assert len(row_digests(torch.zeros(3, 0))) == 3 and len(row_digests(torch.zeros(0, 5))) == 0
    large = torch.randn(70, 20000).bfloat16()  # more pieces than go at once
    assert torch.equal(row_digests(large), torch.cat([row_digests(row.unsqueeze(0)) for row in large]))


def test_every_single_change_is_seen():
    row = torch.randn(1, 37).bfloat16()
    seen = {int(row_digests(row))}
    for index, ulps in itertools.product(range(37), (1, -1, 256, 1 << 14)):
        seen.add(int(row_digests(nudge(row, index, ulps))))
    assert len(seen) == 1 + 37 * 4
    zero = torch.zeros(1, 4)
    assert len({int(row_digests(z)) for z in (zero, -zero, zero.bfloat16(), torch.zeros(1, 5), torch.full((1, 4), torch.nan))}) == 5


def test_a_change_of_one_element_of_32_bits_is_always_seen():
    """What both pieces of a word may change by, times their keys, is never 0: the second's small multiples are far from small numbers."""
    multiples = torch.arange(1, 1 << 17, dtype=torch.int64) * (STEP - WORD)
    nearest = int(torch.minimum(multiples & 0x7FFFFFFFFFFFFFFF, (-multiples) & 0x7FFFFFFFFFFFFFFF).min())
    assert nearest > 1 << 17
    x = torch.randn(1, 50)
    bits = x.view(torch.int32)
    changed = [bits, *(bits ^ (torch.arange(50) == at).int() * torch.randint(1, 1 << 31, ()).int() for at in range(50) for _ in range(40))]
    assert len(row_digests(torch.cat(changed)).unique()) == len(changed)


def test_changes_do_not_cancel():
    """Two flipped signs, or the same change in two places, give digests of their own."""
    row = torch.randn(1, 40).bfloat16()
    bits = row.view(torch.int16)
    for change in (-(1 << 15), 1 << 14, 1):
        changed = [row]
        for a, b in itertools.combinations_with_replacement(range(40), 2):
            new = bits.clone()
            new[0, a] ^= change
            new[0, b] ^= change if a != b else 0
            changed.append(new.view(torch.bfloat16))
        assert len(row_digests(torch.cat(changed)).unique()) == len(changed), change


def test_swapped_elements_are_seen_by_place_and_not_by_column():
    x = torch.randn(4, 24).bfloat16()
    order = torch.randperm(24)
    assert (row_digests(x) != row_digests(x[:, order])).all()
    assert torch.equal(column_digests(x), column_digests(x[:, order]))
    assert torch.equal(column_digests(x), column_digests(x[:, :10]) + column_digests(x[:, 10:]))
    assert (column_digests(x) != column_digests(nudge(x, 0)))[0] and (column_digests(x) != column_digests(nudge(x, 95)))[3]
    assert torch.equal(column_digests(x.float()), column_digests(x.float()[:, order]))


def test_no_two_rows_of_many_share_a_digest():
    rows = torch.randint(0, 3, (100_000, 9), dtype=torch.int16).view(torch.bfloat16).unique(dim=0)
    assert len(rows) > 15_000
    assert len(row_digests(rows).unique()) == len(rows)
    multisets = {tuple(sorted(row)) for row in rows.view(torch.int16).tolist()}
    assert len(column_digests(rows).unique()) == len(multisets)


def test_weights():
    w = torch.randn(12, 16).bfloat16()
    order = torch.randperm(12)
    assert weight_digest(w) != weight_digest(w[order])
    assert weight_digest(w, ordered=False) == weight_digest(w[order], ordered=False)
    assert weight_digest(w, ordered=False) == weight_digest(w[:5], ordered=False) + weight_digest(w[5:], ordered=False)
    experts = torch.randn(4, 6, 8).bfloat16()
    assert weight_digest(experts) == weight_digest(list(experts))
    assert weight_digest(experts) != weight_digest(list(experts[[1, 0, 2, 3]]))
    assert weight_digest(w) != weight_digest(nudge(w, 100))


def test_places():
    d = row_digests(torch.randn(6, 8))
    assert int(placed(d, torch.arange(6)).sum()) != int(placed(d.flip(0), torch.arange(6)).sum())
