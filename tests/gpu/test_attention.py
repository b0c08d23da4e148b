"""Attention: packed, paged, chunked and decode give the same bits; the Triton form everywhere, FlashAttention 3 where it is routed."""

import os

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.attention import fa3
from isoexec.ops.attention import gpu as ops
from isoexec.ops.attention import reference
from isoexec.ops.attention import triton as portable
from isoexec.ops.attention import triton_backward

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
LENGTHS = [70, 0, 33] if INTERPRET else [700, 0, 1, 1333]
HEADS = [(4, 2, 32)] if INTERPRET else [(16, 4, 64), (32, 8, 128), (16, 16, 192), (16, 2, 256)]  # H, G, K


def _routes():
    """(kernel, H, G, K): the Triton form for all, and whatever the public op takes on this GPU."""
    routes = [("triton", *heads) for heads in HEADS]
    return routes if INTERPRET else routes + [("public", *heads) for heads in HEADS]


def _varlen(route, q, k, v, cu, scale):
    if route == "triton":
        return portable.attend(q, k, v, cu, scale, 64, longest_q=len(q))[0]
    return ops.varlen(q, k, v, cu, scale=scale, kv_block=64)


def _paged(route, q, cache, table, seq_lens, start, scale, longest=None):
    if route == "triton":
        return portable.attend(q, *cache, start, scale, 64, longest_q=longest or len(q), seq_lens=seq_lens, block_table=table)[0]
    return ops.paged(q, *cache, table, seq_lens, start, scale=scale, kv_block=64, longest=longest)


def _ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Batch:
    def __init__(self, random, H, G, K, device):
        T = sum(LENGTHS)
        self.q, self.k, self.v = random(T, H, K), random(T, G, K), random(T, G, K)
        self.bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
        self.cu = _ints(self.bounds, device)
        self.scale = K**-0.5


def _cache(batch, page, device, stale):
    """Keys and values in shuffled pages of a cache that holds ``stale`` elsewhere."""
    needs = [-(-n // page) for n in LENGTHS]
    order = torch.randperm(sum(needs) + 3, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.zeros(len(LENGTHS), max(needs) + 1, dtype=torch.int32)
    slots = []
    for b, (n, count) in enumerate(zip(LENGTHS, needs)):
        pages = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(pages, dtype=torch.int32)
        slots += [pages[i // page] * page + i % page for i in range(n)]
    cache = [torch.full((sum(needs) + 3, page, *batch.k.shape[1:]), stale, dtype=torch.bfloat16, device=device) for _ in range(2)]
    portable.write_cache(batch.k, batch.v, *cache, torch.tensor(slots, device=device))
    return cache, table.to(device)


@pytest.mark.parametrize("route,H,G,K", _routes())
def test_every_case_has_the_same_bits(random, device, route, H, G, K):
    batch = Batch(random, H, G, K, device)
    whole = _varlen(route, batch.q, batch.k, batch.v, batch.cu, batch.scale)
    for start, stop in zip(batch.bounds, batch.bounds[1:]):
        at = slice(start, stop)
        if stop > start:
            alone = _varlen(route, batch.q[at], batch.k[at], batch.v[at], _ints([0, stop - start], device), batch.scale)
            assert_bit_equal(alone, whole[at], f"sequence {at} alone")
    last = len(LENGTHS) - 1
    start, n = batch.bounds[last], LENGTHS[last]
    for page in (16,) if INTERPRET else (16, 64, 256, 528):
        # FlashAttention 3 multiplies stale rows by zero: they may be huge there, but finite.
        cache, table = _cache(batch, page, device, torch.nan if route == "triton" else 3e38)
        got = _paged(route, batch.q, cache, table, _ints(LENGTHS, device), batch.cu, batch.scale)
        assert_bit_equal(got, whole, f"prefill, pages of {page}")
        for t in (0, 1, n // 2, n - 2, n - 1):
            row = slice(start + t, start + t + 1)
            for longest in (1, 7):
                got = _paged(route, batch.q[row], cache, table[last:], _ints([t + 1], device), _ints([0, 1], device), batch.scale, longest)
                assert_bit_equal(got, whole[row], f"decode of token {t}, pages of {page}, bound {longest}")
        tail = n // 3
        both = [0, last]
        rows = torch.cat([batch.q[LENGTHS[0] - 1 : LENGTHS[0]], batch.q[start + n - tail :]])
        got = _paged(route, rows, cache, table[both], _ints([LENGTHS[i] for i in both], device), _ints([0, 1, 1 + tail], device), batch.scale)
        assert_bit_equal(got[:1], whole[LENGTHS[0] - 1 : LENGTHS[0]], f"decode beside a chunk, pages of {page}")
        assert_bit_equal(got[1:], whole[start + n - tail :], f"chunk beside a decode, pages of {page}")
    moved = _varlen(route, batch.q, nudge(batch.k, 5, 64), batch.v, batch.cu, batch.scale)
    assert not bit_equal(moved[: LENGTHS[0]], whole[: LENGTHS[0]])
    assert_bit_equal(moved[LENGTHS[0] :], whole[LENGTHS[0] :], "other sequences")


def _last_cases(route, batch, page, device, whole):
    """Decode, chunk and both at once, of the last sequence, in pages of ``page``."""
    cache, table = _cache(batch, page, device, torch.nan if route == "triton" else 3e38)
    last, (start, stop) = len(LENGTHS) - 1, batch.bounds[-2:]
    n = stop - start
    for new, longest in ((1, 1), (1, 7), (n // 3, n)):
        got = _paged(route, batch.q[stop - new : stop], cache, table[last:], _ints([n], device), _ints([0, new], device), batch.scale, longest)
        assert_bit_equal(got, whole[stop - new :], f"{new} new tokens, pages of {page}, bound {longest}")
    rows = torch.cat([batch.q[LENGTHS[0] - 1 : LENGTHS[0]], batch.q[stop - n // 3 :]])
    got = _paged(route, rows, cache, table[[0, last]], _ints([LENGTHS[0], n], device), _ints([0, 1, 1 + n // 3], device), batch.scale)
    assert_bit_equal(got, torch.cat([whole[LENGTHS[0] - 1 : LENGTHS[0]], whole[stop - n // 3 :]]), f"decode beside a chunk, pages of {page}")


@pytest.mark.parametrize("route,H,G,K", _routes() if INTERPRET else [route for route in _routes() if route[0] == "public"])
def test_pages_of_every_size(random, device, route, H, G, K):
    batch = Batch(random, H, G, K, device)
    whole = _varlen(route, batch.q, batch.k, batch.v, batch.cu, batch.scale)
    for page in (16,) if INTERPRET else fa3.PAGE_SIZES:
        _last_cases(route, batch, page, device, whole)


def test_pages_of_other_sizes_are_refused(device):
    q = torch.zeros(1, 4, 128, dtype=torch.bfloat16, device=device)
    cache, table = torch.zeros(2, 24, 2, 128, dtype=torch.bfloat16, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ContractError, match="pages of 24 tokens with head size 128"):
        fa3.attend(q, cache, cache, None, 1.0, longest_q=1, longest_k=24, seq_lens=None, block_table=table)


LONG = [("triton", 8, 2, 64), ("public", 32, 8, 128), ("public", 16, 16, 192), ("public", 16, 2, 256)]


@pytest.mark.parametrize("route,H,G,K", [] if INTERPRET else LONG)
def test_context_of_131072(random, hardware, route, H, G, K):
    """The last rows of a long sequence: decode, and a chunk, against the whole."""
    T, page, new = 131072, 16, 77
    q, k, v = (torch.randn(T, heads, K, device=hardware, generator=torch.Generator(hardware).manual_seed(heads)).bfloat16() for heads in (H, G, G))
    cu, scale = _ints([0, T], hardware), K**-0.5
    whole = portable.attend(q, k, v, cu, scale, 64, longest_q=T)[0] if route == "triton" else ops.varlen(q, k, v, cu, scale=scale, kv_block=64)
    table = torch.randperm(T // page, generator=torch.Generator().manual_seed(1)).to(torch.int32).to(hardware).view(1, -1)
    cache = [torch.empty(T // page, page, G, K, dtype=x.dtype, device=hardware) for x in (k, v)]
    at = table[0].long()
    for target, x in zip(cache, (k, v)):
        target[at] = x.view(-1, page, G, K)
    for rows, longest in ((1, 1), (new, new)):
        got = _paged(route, q[-rows:], cache, table, _ints([T], hardware), _ints([0, rows], hardware), scale, longest)
        assert_bit_equal(got, whole[-rows:], f"{rows} new tokens")
    got = _paged(route, q[70000:70001], cache, table, _ints([70001], hardware), _ints([0, 1], hardware), scale, 1)
    assert_bit_equal(got, whole[70000:70001], "decode inside")
    assert not bit_equal(_paged(route, nudge(q[-1:], 3, 64), cache, table, _ints([T], hardware), _ints([0, 1], hardware), scale, 1), whole[-1:])


@pytest.mark.parametrize("route,H,G,K", _routes()[:: 1 if INTERPRET else 2])
def test_near_the_cpu_backend(random, device, route, H, G, K):
    batch = Batch(random, H, G, K, device)
    at = slice(0, LENGTHS[0])
    cu = _ints([0, LENGTHS[0]], device)
    got = _varlen(route, batch.q[at], batch.k[at], batch.v[at], cu, batch.scale).cpu()
    want = reference.varlen(batch.q[at].cpu(), batch.k[at].cpu(), batch.v[at].cpu(), cu.cpu(), scale=batch.scale, kv_block=64)
    assert (got.float() - want.float()).norm() <= 5e-3 * want.float().norm()


def _doubles(batch, grad, H, G):
    """Gradients (q, k, v) in fp64."""
    doubles = [x.detach().double().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    total = 0.0
    for start, stop in zip(batch.bounds, batch.bounds[1:]):
        if stop > start:
            q, k, v = (x[start:stop].transpose(0, 1) for x in doubles)
            k, v = (x.repeat_interleave(H // G, 0) for x in (k, v))
            mask = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).tril()
            p = (q @ k.mT * batch.scale).masked_fill(~mask, -torch.inf).softmax(-1)
            total = total + ((p @ v).transpose(0, 1) * grad[start:stop].double()).sum()
    return torch.autograd.grad(total, doubles)


@pytest.mark.parametrize("H,G,K", HEADS)
def test_gradients(random, hardware, H, G, K):
    batch = Batch(random, H, G, K, hardware)
    leaves = [x.detach().clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    grad = random(*batch.q.shape)

    def run(inputs):
        return torch.autograd.grad(ops.varlen(*inputs, batch.cu, scale=batch.scale, kv_block=64), inputs, grad)

    got, again = run(leaves), run(leaves)
    for name, g, second, want in zip("qkv", got, again, _doubles(batch, grad, H, G)):
        assert (g - want).norm() <= 8e-3 * want.norm(), name
        assert_bit_equal(g, second, "gradient of a second run")


def _forms():
    """(heads, which pass leaves dS in memory, key heads whose tiles fit): as routed, one key head at a time, and nothing saved."""
    for heads in HEADS:
        if heads[2] in triton_backward.TILES:
            by_keys = triton_backward.TILES[heads[2]].by_keys
            yield from ((heads, by_keys, groups) for groups in (None, 1, 0))
            if INTERPRET:  # the other pass, which another head size takes
                yield heads, not by_keys, None


class Gradients:
    """Gradients (q, k, v) of a batch, by the form that ``by_keys`` and ``groups`` name, and of what was put in place of its inputs."""

    def __init__(self, random, device, heads, by_keys, groups, monkeypatch):
        H, G, K = heads
        monkeypatch.setitem(triton_backward.TILES, K, triton_backward.TILES[K]._replace(by_keys=by_keys))
        self.batch = batch = Batch(random, H, G, K, device)
        self.grad, self.inputs = random(*batch.q.shape), (batch.q, batch.k, batch.v)
        out, lse = portable.attend(*self.inputs, batch.cu, batch.scale, 64, longest_q=max(LENGTHS))
        self.rest = batch.cu, out, lse, batch.scale, max(LENGTHS)
        each = triton_backward.tile_bytes(H // G, K, len(batch.q), len(LENGTHS), max(LENGTHS))
        self.budget = triton_backward.SAVED_BYTES if groups is None else groups * each

    def __call__(self, grad, q, k, v):
        return triton_backward.gradients(grad, q, k, v, *self.rest, budget=self.budget)


@pytest.mark.parametrize("heads,by_keys,groups", list(_forms()))
def test_a_neighbour_that_is_not_finite_reaches_no_gradient(random, device, heads, by_keys, groups, monkeypatch):
    """Every row after the first sequence is NaN, in all four inputs; one NaN among its own rows is seen."""
    run, n = Gradients(random, device, heads, by_keys, groups, monkeypatch), LENGTHS[0]
    inputs = run.grad, *run.inputs
    beside = [torch.cat([x[:n], torch.full_like(x[n:], torch.nan)]) for x in inputs]
    for a, b in zip(run(*beside), run(*inputs)):
        assert_bit_equal(a[:n], b[:n], "gradients")
    for x in beside[:1] if INTERPRET else beside:  # negative control
        kept, x[n - 1] = x[n - 1].clone(), torch.nan
        assert any(not g[:n].isfinite().all() for g in run(*beside))
        x[n - 1] = kept


@pytest.mark.parametrize("heads,by_keys,groups", list(_forms()))
def test_triton_gradients(random, device, heads, by_keys, groups, monkeypatch):
    """Of views, too: heads of one projection, tokens apart. No sequence begins at a multiple of the tiles."""
    run, (H, G, K) = Gradients(random, device, heads, by_keys, groups, monkeypatch), heads
    batch, grad = run.batch, run.grad
    packed = torch.cat([batch.q, batch.k, batch.v], 1)
    for q, k, v in ((batch.q, batch.k, batch.v), packed.split([H, G, G], 1)):
        got = run(grad, q, k, v)
        for name, g, want in zip("qkv", got, _doubles(batch, grad, H, G)):
            assert (g - want).norm() <= 8e-3 * want.norm(), name
    moved = run(nudge(grad, (LENGTHS[0] - 1) * H * K + 5, 64), q, k, v)
    assert not any(bit_equal(a, b) for a, b in zip(moved, got))
    for a, b in zip(moved, got):
        assert_bit_equal(a[LENGTHS[0] :], b[LENGTHS[0] :], "other sequences")
    if not INTERPRET:
        for a, b in zip(run(grad, q, k, v), got):
            assert_bit_equal(a, b, "gradient of a second run")
