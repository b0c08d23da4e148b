"""Causal attention of the CPU backend: packed and paged give one set of bits, whatever the layout."""

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import attention
from isoexec.ops._core.bits import assert_bit_equal, nudge
from op_checks import bf16_values, same_bits
from tests.poison import unwritten_memory

H, G, K, BLOCK = 6, 2, 32, 64
SCALE = K**-0.5


def qkv(lengths, heads=H, groups=G, size=K):
    """fp32 tensors of bf16 values, so that outputs are seen before their rounding."""
    T = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return bf16_values(T, heads, size), bf16_values(T, groups, size), bf16_values(T, groups, size), starts


def packed(q, k, v, starts):
    return attention.varlen(q, k, v, starts, scale=SCALE, kv_block=BLOCK)


def exact(q, k, v, starts):
    q, k, v = q.double(), k.double(), v.double()
    repeat, out = q.shape[1] // k.shape[1], []
    for a, b in zip(starts.tolist(), starts.tolist()[1:]):
        keys, values = (x[a:b].repeat_interleave(repeat, 1).transpose(0, 1) for x in (k, v))
        scores = q[a:b].transpose(0, 1) @ keys.mT * SCALE
        later = torch.ones(b - a, b - a, dtype=torch.bool).triu(1)
        out.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


class PagedBatch:
    """Caches full of NaN, pages in random order; tokens are written as a runtime writes them, chunk by chunk."""

    def __init__(self, batch, page_size, heads_first=False):
        self.q, self.k, self.v, self.starts = batch
        self.page_size = page_size
        self.lengths = self.starts.diff().tolist()
        used = [-(-n // page_size) for n in self.lengths]
        count, groups, size = sum(used) + 3, self.k.shape[1], self.k.shape[2]
        if heads_first:  # keys and values side by side, heads before tokens: vLLM's CPU cache
            both = torch.full((count, groups, page_size, 2 * size), torch.nan).transpose(1, 2)
            self.key_cache, self.value_cache = both[..., :size], both[..., size:]
        else:
            self.key_cache, self.value_cache = (torch.full((count, page_size, groups, size), torch.nan) for _ in "kv")
        order = iter(torch.randperm(count).tolist())
        self.table = torch.full((len(used), max(used) + 2), 2**30, dtype=torch.int32)
        for b, n in enumerate(used):
            for j in range(n):
                self.table[b, j] = next(order)
        self.done = [0] * len(used)

    def step(self, counts):
        """Run the next ``counts[b]`` tokens of each sequence; returns (their rows in the packed batch, output)."""
        rows, slots = [], []
        for b, n in enumerate(counts):
            for p in range(self.done[b], self.done[b] + n):
                rows.append(int(self.starts[b]) + p)
                slots.append(int(self.table[b, p // self.page_size]) * self.page_size + p % self.page_size)
            self.done[b] += n
        rows = torch.tensor(rows, dtype=torch.int64)
        slots = torch.tensor(slots, dtype=torch.int64)
        attention.write_cache(self.k[rows], self.v[rows], self.key_cache, self.value_cache, slots)
        out = attention.paged(
            self.q[rows], self.key_cache, self.value_cache, self.table, torch.tensor(self.done, dtype=torch.int32),
            torch.tensor([0, *counts]).cumsum(0).int(), scale=SCALE, kv_block=BLOCK,
        )  # fmt: skip
        return rows, out

    def run(self, chunk):
        """All tokens, ``chunk(b, left)`` at a time; returns the output in packed order."""
        out = torch.full_like(self.q, torch.nan)
        while any(left := [n - d for n, d in zip(self.lengths, self.done)]):
            rows, o = self.step([min(n, chunk(b, n)) for b, n in enumerate(left)])
            out[rows] = o
        return out


@pytest.mark.parametrize("heads,groups,size", [(6, 2, 32), (4, 4, 16), (8, 1, 64), (2, 1, 128)])
def test_accuracy(heads, groups, size):
    batch = qkv([1, 5, 64, 65, 130], heads, groups, size)
    out = packed(*batch)
    # P is rounded to bf16: 2^-9 of the values it weighs.
    assert (out.double() - exact(*batch)).abs().max() < 2.0**-9 * batch[2].abs().max()


def test_packed_equals_separate_and_empty_sequences_change_nothing():
    lengths = [70, 0, 1, 64, 0, 0, 129, 16]
    q, k, v, starts = qkv(lengths)
    whole = packed(q, k, v, starts)
    for a, b in zip(starts.tolist(), starts.tolist()[1:]):
        alone = packed(q[a:b], k[a:b], v[a:b], torch.tensor([0, b - a], dtype=torch.int32))
        same_bits(alone, whole[a:b], f"tokens {a} to {b}")
    without = torch.tensor([0, *[n for n in lengths if n]]).cumsum(0).int()
    same_bits(packed(q, k, v, without), whole, "without empty sequences")
    assert packed(q[:0], k[:0], v[:0], torch.tensor([0, 0], dtype=torch.int32)).shape == (0, H, K)


@pytest.mark.parametrize("page_size,heads_first", [(16, False), (16, True), (32, False), (48, True), (128, False), (128, True)])
def test_paged_equals_packed_in_any_split(page_size, heads_first):
    batch = qkv([150, 1, 64, 97, 17])
    whole = packed(*batch)
    splits = {
        "one shot": lambda b, left: left,
        "chunks of 37": lambda b, left: 37,
        "uneven chunks": lambda b, left: 1 + (left * 7 + b * 5) % 29,
        "prefill, then decode": lambda b, left: left - 3 if left > 3 else 1,
        "decode beside prefill": lambda b, left: 50 if b == 0 else 1,
    }
    for name, chunk in splits.items():
        same_bits(PagedBatch(batch, page_size, heads_first).run(chunk), whole, name)


def test_decode_from_the_first_token():
    batch = qkv([70, 3])
    same_bits(PagedBatch(batch, 16).run(lambda b, left: 1), packed(*batch), "token by token")


@pytest.mark.parametrize("n", [1, 2, 3, 8, 17, 33, 64, 257])
def test_a_decoding_sequence_does_not_depend_on_its_neighbours(n):
    lengths = [130] + [1 + (i * 37) % 90 for i in range(n - 1)]
    batch = qkv(lengths)
    whole = packed(*batch)
    paged = PagedBatch(batch, 32)
    paged.step([length - 1 for length in lengths])
    rows, out = paged.step([1] * n)
    same_bits(out, whole[rows], f"{n} sequences")
    q, k, v, _ = batch
    alone = packed(q[:130], k[:130], v[:130], torch.tensor([0, 130], dtype=torch.int32))
    same_bits(out[:1], alone[-1:], "first sequence")


def test_memory_beyond_a_sequence_is_selected_away():
    """Pages start as NaN, block tables end in garbage; Inf in a neighbour's pages does not matter either."""
    batch = qkv([33, 80])
    q, k, v, starts = batch
    whole = packed(*batch)
    k[33:], v[33:] = torch.inf, torch.inf
    paged = PagedBatch(batch, 16)
    rows, out = paged.step([33, 80])
    assert out[:33].isfinite().all()
    same_bits(out[:33], whole[:33], "beside a sequence of Inf")
    same_bits(packed(*batch)[:33], whole[:33], "packed beside a sequence of Inf")


def test_a_row_does_not_read_later_tokens():
    q, k, v, starts = qkv([100])
    whole = packed(q, k, v, starts)
    k[60:], v[60:] = k[60:] * 1e30, v[60:] * -1e30
    same_bits(packed(q, k, v, starts)[:60], whole[:60], "huge later tokens")


def test_one_ulp_in_a_cached_key_shows():
    batch = qkv([40])
    paged = PagedBatch(batch, 16)
    paged.step([39])
    page = int(paged.table[0, 0])
    paged.key_cache[page, 3] = nudge(paged.key_cache[page, 3], 5, ulps=1 << 16)  # one ulp of bf16
    rows, out = paged.step([1])
    with pytest.raises(AssertionError, match="decode"):
        assert_bit_equal(out, packed(*batch)[rows], "decode")


def test_subnormals_and_signed_zeros():
    q, k, v, starts = qkv([80])
    v.mul_(2.0**-130)
    whole = packed(q, k, v, starts)
    assert (whole.abs().sum(-1) > 0).all()
    same_bits(PagedBatch((q, k, v, starts), 16).run(lambda b, left: 13), whole, "subnormal values")
    v.copy_(torch.where(v > 0, -0.0, -1.0))
    v[0] = -0.0
    same_bits(PagedBatch((q, k, v, starts), 16).run(lambda b, left: 1), packed(q, k, v, starts), "signed zeros")


def test_bf16_in_bf16_out():
    q, k, v, starts = qkv([70, 20])
    out = attention.varlen(q.bfloat16(), k.bfloat16(), v.bfloat16(), starts, scale=SCALE, kv_block=BLOCK)
    same_bits(out, packed(q, k, v, starts).bfloat16(), "one rounding")


def test_views_of_a_stacked_projection():
    q, k, v, starts = qkv([50, 9])
    stacked = torch.cat([q, k, v], 1)
    views = stacked[:, :H], stacked[:, H : H + G], stacked[:, H + G :]
    same_bits(packed(*views, starts), packed(q, k, v, starts), "views")


def test_padding_rows_and_slots():
    """Runtimes pad a batch: slot -1 stores nothing, rows of q beyond the last sequence come out as zeros."""
    batch = qkv([20])
    q, k, v, starts = batch
    paged = PagedBatch(batch, 16)
    paged.step([20])
    before = paged.key_cache.clone()
    attention.write_cache(k[:3], v[:3], paged.key_cache, paged.value_cache, torch.full((3,), -1, dtype=torch.int64))
    assert_bit_equal(paged.key_cache, before, "cache")
    padded = torch.cat([q, torch.full((4, H, K), torch.nan)])
    out = attention.paged(
        padded, paged.key_cache, paged.value_cache, paged.table, torch.tensor([20], dtype=torch.int32), starts, scale=SCALE, kv_block=BLOCK
    )
    same_bits(out[:20], packed(*batch), "padded batch")
    assert (out[20:] == 0).all()


def test_slots_beyond_int32_elements():
    pages, page_size, groups, size = 2**15 + 2, 128, 8, 64
    with unwritten_memory(poisoned=False):  # 4 GiB of address space; two pages are touched
        both = torch.empty(pages, groups, page_size, 2 * size, dtype=torch.bfloat16).transpose(1, 2)
    assert both.numel() > 2**31
    caches = both[..., :size], both[..., size:]
    q, k, v, starts = (x.bfloat16() if x.is_floating_point() else x for x in qkv([9], 8, groups, size))
    last = pages - 1
    attention.write_cache(k, v, *caches, last * page_size + torch.arange(9))
    out = attention.paged(q, *caches, torch.tensor([[last]]).int(), torch.tensor([9]).int(), starts, scale=SCALE, kv_block=BLOCK)
    same_bits(out, packed(q, k, v, starts), "last page")


def test_heads_that_do_not_divide_are_refused():
    q, k, v, starts = qkv([4])
    with pytest.raises(ContractError, match="2 key heads do not divide 5"):
        packed(q[:, :5], k, v, starts)


@pytest.mark.parametrize("bounds", [[0, 3], [1, 4], [0, 3, 2, 4], [0, 5], []])
def test_a_packing_that_is_not_of_these_tokens_is_refused(bounds):
    q, k, v, _ = qkv([4])
    with pytest.raises(ContractError, match="cu_seqlens: expected entries ascending from 0 to the 4 tokens"):
        packed(q, k, v, torch.tensor(bounds, dtype=torch.int32))
