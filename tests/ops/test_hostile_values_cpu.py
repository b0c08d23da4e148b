"""Subnormals, signed zeros, NaN bits and single ulps through the ops of the CPU backend. Rows of NaN and no rows: test_every_batch_size_cpu.py."""

import pytest
import torch

from isoexec.ops import activation, attention, embedding, logprob, matmul, moe, norm, rope, sampling
from isoexec.ops._core.bits import bit_equal, nudge
from op_checks import batch_invariant, bf16_values, gradients_close, same_bits

TINY, ONE_BF16_ULP, EPS = 2.0**-133, 1 << 16, 1e-6
PRODUCTS = {
    "linear": matmul.linear,
    "row-parallel": lambda x, w: matmul.row_parallel_linear(x, w, leaves=4),
    "lm_head": matmul.lm_head,
    "router_logits": moe.router_logits,
}
NORMS = {
    "rms_norm": lambda x: norm.rms_norm(x, torch.ones(16), EPS),
    "add_rms_norm": lambda x: norm.add_rms_norm(x, x, torch.ones(16), EPS)[0],
    "zero_centered": lambda x: norm.zero_centered_rms_norm(x, torch.zeros(16), EPS),
    "add_zero_centered": lambda x: norm.add_zero_centered_rms_norm(x, x, torch.zeros(16), EPS)[0],
    "gated": lambda x: norm.gated_rms_norm(x, torch.full_like(x, 40.0), torch.ones(16), EPS) / 40.0,  # silu(40) is 40
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_signed_zeros_start_at_plus_zero(name):
    """-0.0 alone in a sum that starts at +0.0 is +0.0, whatever the number of rows."""
    w = bf16_values(70, 64).abs()
    for rows in (1, 33):
        same_bits(PRODUCTS[name](torch.full((rows, 64), -0.0), w), torch.zeros(rows, 70), "sum of negative zeros")


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_keep_subnormals(name):
    x = torch.zeros(33, 64)
    x[:, 5] = TINY
    same_bits(PRODUCTS[name](x, torch.full((70, 64), 4.0)), torch.full((33, 70), 4 * TINY), "a subnormal times 4")


def test_gradient_of_the_router_logits():
    gradients_close(moe.router_logits, lambda x, w: x @ w.mT, (bf16_values(9, 64).bfloat16(), bf16_values(12, 64).bfloat16()))


@pytest.mark.parametrize("name", NORMS)
def test_norms_keep_subnormals_and_the_sign_of_zero(name):
    zero, tiny = torch.full((3, 16), -0.0), torch.full((3, 16), TINY)
    same_bits(NORMS[name](zero), zero, "negative zeros")
    found = NORMS[name](tiny).double()
    exact = tiny.double() * (2.0 if name.startswith("add") else 1.0) * EPS**-0.5
    assert ((found - exact).abs() <= 2.0**-22 * exact + 2.0**-149).all() and (found > 0).all()


def test_gradient_of_the_zero_centred_fused_norm():
    x, r, w = (bf16_values(*s).bfloat16() for s in ((5, 3, 64), (5, 3, 64), (64,)))

    def reference(x, r, w):
        total = x + r
        return total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + w) + total

    gradients_close(lambda x, r, w: torch.add(*norm.add_zero_centered_rms_norm(x, r, w, EPS)), reference, (x, r, w))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_subnormals_and_signed_zeros(interleaved):
    """Each product is rounded, then the sum: spelled out in fp64, where a product of two fp32 values is exact."""
    cos, sin = rope.rope_table(torch.arange(5), 16, 1e4)
    for x in (torch.full((5, 2, 16), TINY), torch.full((5, 2, 16), -0.0), bf16_values(5, 2, 16) * 2.0**-130):
        a, b = x.unflatten(-1, (8, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
        times = lambda t, c: (t.double() * c[:, None].double()).float()
        turned = times(a, cos) - times(b, sin), times(b, cos) + times(a, sin)
        expected = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        same_bits(rope.apply_rope(x, cos, sin, interleaved=interleaved), expected, "rotation")
        assert (expected != 0).any() or x.signbit().all()


def test_rope_table_on_two_threads():
    positions = torch.randint(0, 100_000, (4099,))
    alone = rope.rope_table(positions, 64, 1e6)
    torch.set_num_threads(2)
    try:
        for found, expected, name in zip(rope.rope_table(positions, 64, 1e6), alone, ("cos", "sin")):
            same_bits(found, expected, name)
    finally:
        torch.set_num_threads(1)


def attend(q, k, v):
    return attention.varlen(q, k, v, torch.tensor([0, len(q)]).int(), scale=0.25, kv_block=64)


class Paged:
    """One sequence of 70 tokens in pages of 16."""

    def __init__(self, q, k, v):
        self.q, self.caches = q, [torch.full((6, 16, 2, 16), float("nan")) for _ in "kv"]
        self.table = torch.tensor([[4, 0, 5, 2, 1]], dtype=torch.int32)
        position = torch.arange(len(q))
        attention.write_cache(k, v, *self.caches, self.table[0][position // 16].long() * 16 + position % 16)

    def __call__(self):
        n = torch.tensor([len(self.q)], dtype=torch.int32)
        return attention.paged(self.q, *self.caches, self.table, n, torch.tensor([0, len(self.q)]).int(), scale=0.25, kv_block=64)


@pytest.mark.parametrize("field", ["q", "k"])
def test_attention_keeps_subnormal_scores(field):
    """Scores of subnormal queries or keys are next to zero: the same weights as for zeros, not NaN, packed and paged."""
    case = dict(q=bf16_values(70, 4, 16), k=bf16_values(70, 2, 16), v=bf16_values(70, 2, 16))
    case[field] = case[field] * 2.0**-130
    found = attend(**case)
    same_bits(Paged(**case)(), found, "paged")
    same_bits(found, attend(**{**case, field: torch.zeros_like(case[field])}), "zeros")
    other = "k" if field == "q" else "q"
    huge = {**case, other: torch.where(case[other] > 0, 2.0**127, -(2.0**127))}
    assert not bit_equal(attend(**huge), found), "a flushed subnormal times a huge number would be nothing"
    same_bits(Paged(**huge)(), attend(**huge), "paged beside huge numbers")


@pytest.mark.parametrize("field", ["q", "k", "v"])
def test_one_ulp_of_attention_is_seen(field):
    case = dict(q=bf16_values(70, 4, 16), k=bf16_values(70, 2, 16), v=bf16_values(70, 2, 16))
    before, paged = attend(**case), Paged(**case)
    at = 40 * case[field][0].numel() + int(case[field][40].abs().argmax())
    after = attend(**{**case, field: nudge(case[field], at, ONE_BF16_ULP)})
    same_bits(after[:40], before[:40], "earlier tokens")
    assert not bit_equal(after[40:], before[40:])
    same_bits(paged(), before, "paged")
    if field != "q":
        cache = paged.caches["kv".index(field)]
        row = cache[5, 8]  # token 40: third page, ninth row
        row.copy_(nudge(row, int(row.abs().argmax()), ONE_BF16_ULP))
        same_bits(paged(), after, "the moved value, paged")


def test_the_cache_holds_bits():
    """Subnormals, -0.0 and the payload of a NaN."""
    k = torch.tensor([0x0001, -0x8000, 0x7FC5, -0x0035], dtype=torch.int16).view(torch.bfloat16).view(2, 1, 2)
    caches = [torch.zeros(2, 4, 1, 2, dtype=torch.bfloat16) for _ in "kv"]
    attention.write_cache(k, k.flip(0), *caches, torch.tensor([6, 1]))
    for cache, rows in zip(caches, (k, k.flip(0))):
        same_bits(cache.view(8, 1, 2)[[6, 1]], rows, "stored rows")
        assert (cache.view(8, 1, 2)[[0, 2, 3, 4, 5, 7]] == 0).all()


def test_embedding_rows_do_not_see_their_batch():
    weight, ids = bf16_values(50, 24).bfloat16(), torch.randint(0, 50, (257,))
    batch_invariant(lambda ids: embedding.embedding(ids, weight), ids, what="embedding")
    assert embedding.embedding(ids[:0], weight).shape == (0, 24)


def test_temperature_keeps_signed_zeros():
    zero = torch.full((3, 5), -0.0)
    same_bits(logprob.scale_by_temperature(zero, torch.tensor(0.7)), zero, "negative zeros")


def test_subnormal_and_negative_zero_logits_are_zeros_to_the_softmax():
    zeros, settings = torch.zeros(4, 130), dict(vocab_size=130, vocab_block=64)
    tokens = torch.arange(4)
    for x in (-zeros, torch.full_like(zeros, 2.0**-140) * (torch.arange(130) % 3 - 1)):
        same_bits(logprob.log_softmax(x, **settings), logprob.log_softmax(zeros, **settings), "log_softmax")
        found, expected = (logprob.token_logprob(t, tokens, **settings) for t in (x, zeros))
        same_bits(found, expected, "token_logprob")


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_router_ranks_subnormal_logits_as_its_scores(scoring):
    """Their scores tie, so the lowest experts win; a logit that is seen in its score still wins."""
    x = torch.full((3, 8), 2.0**-140) * (torch.arange(8) % 3 - 1)
    x[2, 5] = 2.0**-20
    weights, experts = moe.route(x, top_k=3, renormalize=True, scoring=scoring)
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2], [5, 0, 1]]
    zeros, _ = moe.route(torch.zeros(2, 8), top_k=3, renormalize=True, scoring=scoring)
    same_bits(weights[:2], zeros, "weights of zeros")


def test_experts_on_subnormals_and_signed_zeros():
    """The bits of the dense ops, pair by pair."""
    gate_up, down, experts = bf16_values(4, 32, 24).bfloat16(), bf16_values(4, 24, 16).bfloat16(), torch.tensor([[2, 0], [1, 2]])
    for x in (torch.full((2, 24), -0.0), torch.full((2, 24), TINY), bf16_values(2, 24) * 2.0**-60):
        x = x.bfloat16()
        dense = [matmul.linear(activation.silu_mul(matmul.linear(row[None], gate_up[e])), down[e]) for row, es in zip(x, experts) for e in es]
        same_bits(moe.expert_mlp(x, experts, gate_up, down).flatten(0, 1), torch.cat(dense), "a pair alone")
    assert dense[0].abs().max() > 0, "the smallest products are kept"


def test_one_ulp_of_a_logit_moves_the_balancing_loss():
    x, counts = torch.randn(50, 16) * 2, torch.arange(16)
    loss = lambda x: moe.load_balancing_loss(x, counts, total_tokens=50, top_k=4, coefficient=1.0)[None]
    same_bits(loss(x.clone()), loss(x), "loss")
    assert not bit_equal(loss(nudge(x, int(x[7].argmax()) + 7 * 16, ONE_BF16_ULP)), loss(x))


def test_draws_beside_rows_of_nan_and_of_minus_infinity():
    """Such a row gets some token of the vocabulary; the others get theirs."""
    logprobs = torch.randn(5, 1001).log_softmax(-1)
    generators = lambda: [torch.Generator().manual_seed(seed) for seed in range(5)]
    clean, first = sampling.draw(logprobs, generators()), sampling.first_maximum(logprobs)
    for filling in (float("nan"), -torch.inf):
        logprobs[2] = filling
        for found, expected in ((sampling.draw(logprobs, generators()), clean), (sampling.first_maximum(logprobs), first)):
            same_bits(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]], "other rows")
            assert 0 <= found[2] < 1001
    assert sampling.first_maximum(torch.full((1, 1001), -torch.inf)).item() == 0


def test_minus_zero_and_zero_tie_for_the_maximum():
    for width in (2, 7, 64, 1001):
        x = torch.full((2, width), -1.0)
        x[0, [0, width - 1]] = torch.tensor([-0.0, 0.0])
        x[1, [0, width - 1]] = torch.tensor([0.0, -0.0])
        assert sampling.first_maximum(x).tolist() == [0, 0]
        assert sampling.first_maximum(nudge(x, width - 1, 1)).tolist() == [width - 1, 0], "one ulp above zero wins"
