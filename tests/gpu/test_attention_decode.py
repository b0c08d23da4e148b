"""Decode by more programs than FlashAttention 3 has: the bits of its one split, output and log-sum-exp, whatever the batch, its lengths and its cache."""

import pytest
import torch

from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.attention import fa3, hopper_decode
from isoexec.ops.attention import gpu as ops


def _ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.fixture
def provider(hardware):
    if not ops.uses_fa3(hardware, 128):
        pytest.skip("where FlashAttention 3 is not routed, one kernel serves every batch")
    return hardware


class Decode:
    """One new token each of sequences of ``lengths``; None: a sequence without one. Pages in disorder; what follows a sequence is huge, and pages of none
    are NaN."""

    def __init__(self, device, lengths, H, G, K, page=16, form="tokens", bound=0):
        draw = torch.Generator(device).manual_seed(H + K + len(lengths))
        randn = lambda *shape: torch.randn(shape, device=device, generator=draw).bfloat16()  # noqa: E731
        known = [n or 0 for n in lengths]
        needs = [-(-n // page) for n in known]
        pages, width = sum(needs) + 3, max(*needs, -(-bound // page), 1)
        gap = int(form.partition("apart ")[2] or 0)  # channels between heads; between tokens 8 more
        shape = {"tokens": (pages, page, G, K), "heads": (pages, G, page, K), "paired": (pages, 2, page, G, K)}.get(form, (pages, page, G * (K + gap) + 8))
        stores = [randn(*shape) for _ in range(1 if form == "paired" else 2)]
        views = stores[0].unbind(1) if form == "paired" else stores
        self.caches = [x.transpose(1, 2) for x in views] if form == "heads" else list(views)
        if gap:
            self.caches = [x[..., :-8].unflatten(2, (G, K + gap))[..., :K] for x in views]
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).tolist()
        self.table = torch.full((len(lengths), width), order[-1], dtype=torch.int32, device=device)
        for b, count in enumerate(needs):
            self.table[b, :count] = _ints([order.pop(0) for _ in range(count)], device)
        for cache in self.caches:
            cache[order[:-1]], cache[order[-1]] = torch.nan, 3e38
            for b, (n, count) in enumerate(zip(known, needs)):
                if n % page:
                    cache[self.table[b, count - 1], n % page :] = 3e38
        new = torch.tensor([n is not None for n in lengths])
        self.lengths, self.start = _ints(known, device), _ints([0, *new.cumsum(0).tolist()], device)
        self.q, self.scale = randn(int(new.sum()), H, K), K**-0.5

    def by_more_programs(self, q=None):
        q = self.q if q is None else q
        assert hopper_decode.serves(q, *self.caches, self.table)
        return hopper_decode.attend(q, *self.caches, self.table, self.lengths, self.start, self.scale)

    def one_split(self):
        bound = self.table.shape[1] * self.caches[0].shape[1]
        return fa3.attend(self.q, *self.caches, self.start, self.scale, longest_q=1, longest_k=bound, seq_lens=self.lengths, block_table=self.table)

    def assert_equal(self, case):
        for name, got, want in zip(("output", "log-sum-exp"), self.by_more_programs(), self.one_split()):
            assert not want.isnan().any()
            assert_bit_equal(got, want, f"{name}, {case}")


RAGGED = [1, 0, None, 15, 16, 17, 79, 80, 81, 95, 96, 97, 127, 128, 129, 160, 161, 319, 1000, 4097, 33000]
DECODES = [(16, 2, 256), (8, 8, 256), (16, 1, 256), (32, 8, 128), (15, 3, 128), (16, 1, 128), (6, 2, 192), (16, 16, 192)]


@pytest.mark.parametrize("H,G,K", DECODES)
def test_decode_by_more_programs_has_the_bits_of_one_split(provider, H, G, K):
    some = max(1, hopper_decode.PAIRS[K] // G)
    for first in range(0, len(RAGGED), some):
        Decode(provider, RAGGED[first : first + some], H, G, K).assert_equal(f"lengths {RAGGED[first : first + some]}")
    batch = Decode(provider, [700, 33][:some], H, G, K, form="heads")
    batch.assert_equal("heads before tokens")
    moved = batch.by_more_programs(nudge(batch.q, H // 2 * K + 5, 64))
    assert not any(bit_equal(a, b) for a, b in zip(moved, batch.one_split()))


@pytest.mark.parametrize("H,G,K", DECODES[::3])
def test_decode_by_more_programs_in_every_layout_and_batch(provider, H, G, K):
    for page, form in ((16, "paired"), (48, "heads"), (528, "tokens"), (2048, "paired")):
        Decode(provider, [1, 2047, 2113], H, G, K, page, form).assert_equal(f"pages of {page}, {form}")
    Decode(provider, [1, 100, 161], H, G, K, form="apart 16").assert_equal("heads and tokens apart")
    for B in (1, 2, 3, 5, 8, 16, 32, 64):
        if B * G <= hopper_decode.PAIRS[K]:
            Decode(provider, [37 * (b + 1) for b in range(B)], H, G, K).assert_equal(f"{B} sequences")


def test_decode_by_more_programs_of_131072(provider):
    for H, G, K in ((16, 2, 256), (32, 8, 128)):
        Decode(provider, [131072, 5], H, G, K).assert_equal("a long context")


def test_a_replayed_decode_by_more_programs_follows_its_inputs(provider):
    batch = Decode(provider, [3000, 70, 1], 16, 2, 256, bound=8192)
    batch.by_more_programs()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = batch.by_more_programs()
    for lengths in ([2999, 64, 1], [17, 1, 0], [3000, 70, 1]):
        batch.lengths.copy_(_ints(lengths, provider))
        graph.replay()
        for a, b in zip(got, batch.one_split()):
            assert_bit_equal(a, b, f"lengths {lengths}")


def test_the_size_of_a_batch_that_decodes_moves_no_bit(provider, monkeypatch):
    """On both sides of the limit, through the op; which form runs is counted."""
    count, attend = [], hopper_decode.attend
    monkeypatch.setattr(hopper_decode, "attend", lambda *args: count.append(len(args[4])) or attend(*args))
    batch = Decode(provider, [50 + 11 * b for b in range(40)], 16, 2, 256)
    whole = ops.paged(batch.q, *batch.caches, batch.table, batch.lengths, batch.start, scale=batch.scale, kv_block=64, longest=1)
    assert not count
    for part in (slice(0, 1), slice(5, 12), slice(8, 40)):
        start = batch.start[: part.stop - part.start + 1]
        got = ops.paged(batch.q[part], *batch.caches, batch.table[part], batch.lengths[part], start, scale=batch.scale, kv_block=64, longest=1)
        assert_bit_equal(got, whole[part], str(part))
    assert count == [1, 7, 32]


def test_heads_an_odd_multiple_of_8_channels_apart_keep_the_provider(provider):
    batch, beside = (Decode(provider, [1, 100, 161], 16, 2, 256, form=form) for form in ("apart 8", "tokens"))
    for cache, other in zip(batch.caches, beside.caches):
        other.copy_(cache)
    assert not hopper_decode.serves(batch.q, *batch.caches, batch.table) and hopper_decode.serves(batch.q, *beside.caches, batch.table)
    got, want = (
        ops.paged(batch.q, *caches, batch.table, batch.lengths, batch.start, scale=batch.scale, kv_block=64, longest=1)
        for caches in (batch.caches, beside.caches)
    )
    assert_bit_equal(got, want, "heads 264 channels apart")


def test_what_more_programs_serve():
    """Everything else keeps FlashAttention 3: large batches, many heads, long tables, and caches that are no rows at one distance."""
    q, cache = torch.zeros(4, 16, 256, dtype=torch.bfloat16), torch.zeros(6, 16, 2, 256, dtype=torch.bfloat16)

    def serves(q=q, keys=cache, values=cache, sequences=4, width=3):
        return hopper_decode.serves(q, keys, values, torch.zeros(sequences, width, dtype=torch.int32))

    assert serves() and serves(sequences=32) and not serves(sequences=33) and not serves(sequences=0)
    assert serves(width=65_000) and not serves(width=66_000)
    assert not serves(q[:1, :2], sequences=1, width=65_537)
    assert serves(q.repeat(1, 2, 1)) and not serves(q.repeat(1, 4, 1)) and not serves(q[..., :64], cache[..., :64], cache[..., :64])

    def strided(*strides):
        return cache.new_zeros(2 * 6 * 16 * 552).as_strided(cache.shape, strides)

    for strides in ((16 * 512, 512, 260, 1), (16 * 528, 528, 264, 1), (16 * 512 + 16, 512, 256, 1), (16 * 512, 512, 256, 2)):
        assert not serves(keys=strided(*strides)) and not serves(values=strided(*strides))
    for strides in ((16 * 544, 544, 272, 1), (16 * 520, 520, 256, 1), (32 * 512, 512, 256, 1)):
        assert serves(keys=strided(*strides), values=strided(*strides))
    assert not serves(keys=torch.zeros(6, 24, 2, 256, dtype=torch.bfloat16))


def test_pages_are_found_without_a_division():
    """What `_page` multiplies by, at every size and wherever a page begins."""
    for page in fa3.PAGE_SIZES:
        inverse = -(-(2**34) // page)
        at = torch.arange(0, hopper_decode.LONGEST, 16)
        assert inverse < 2**31 and torch.equal((at >> 4 << 2) * inverse >> 32, at // page)
