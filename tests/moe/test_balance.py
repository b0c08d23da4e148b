"""Load balancing: counts, auxiliary loss, expert bias."""

import pytest
import torch

from isoexec.ops import moe
from isoexec.ops._core.bits import bit_equal, nudge
from tests.ops.op_checks import same_bits


def logits(T=50, E=16, seed=0):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) * 2


def test_counts_skip_what_is_not_valid():
    _, experts = moe.route(logits(), top_k=4, renormalize=True)
    counts = moe.tokens_per_expert(experts, num_experts=16)
    assert counts.tolist() == [int((experts == e).sum()) for e in range(16)] and counts.sum() == 200
    valid = torch.arange(50) < 20
    same_bits(moe.tokens_per_expert(experts, num_experts=16, valid=valid), moe.tokens_per_expert(experts[:20], num_experts=16))
    assert moe.tokens_per_expert(experts[:0], num_experts=16).tolist() == [0] * 16


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_loss_and_gradient_are_those_of_fp64(scoring):
    x = logits().requires_grad_()
    _, experts = moe.route(x, top_k=4, renormalize=True, scoring=scoring)
    counts = moe.tokens_per_expert(experts, num_experts=16)
    loss = moe.load_balancing_loss(x, counts, total_tokens=50, top_k=4, coefficient=0.1, scoring=scoring)
    loss.backward()
    y = x.detach().double().requires_grad_()
    score = torch.softmax(y, -1) if scoring == "softmax" else torch.sigmoid(y) / torch.sigmoid(y).sum(-1, keepdim=True)
    expected = 0.1 * 16 * (counts / (4 * 50) * score.sum(0) / 50).sum()
    expected.backward()
    assert loss.dtype == torch.float32 and abs(loss.item() - expected.item()) < 1e-7
    assert (x.grad.double() - y.grad).abs().max() < 1e-8 and y.grad.abs().max() > 1e-6


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_tokens_gradient_is_its_own_whatever_the_order_of_the_batch(scoring):
    """And the same in a second run; the loss, a sum over tokens, moves by roundings. One ulp of a logit moves its row's gradient alone."""
    x = logits(T=67)
    counts = moe.tokens_per_expert(moe.route(x, top_k=4, renormalize=True, scoring=scoring)[1], num_experts=16)

    def run(rows):
        rows = rows.clone().requires_grad_()
        loss = moe.load_balancing_loss(rows, counts, total_tokens=67, top_k=4, coefficient=1.0, scoring=scoring)
        loss.backward()
        return loss.detach(), rows.grad

    loss, gradient = run(x)
    for again in (run(x), run(x.clone())):
        same_bits(again[0], loss, "loss")
        same_bits(again[1], gradient, "gradient")
    order = torch.randperm(67)
    permuted = run(x[order])
    same_bits(permuted[1], gradient[order], "gradient of a permuted batch")
    assert abs(permuted[0] - loss) < 1e-6
    planted = nudge(x, 31 * 16 + int(x[31].argmax()), ulps=1)
    moved = run(planted)[1]
    others = torch.arange(67) != 31
    same_bits(moved[others], gradient[others], "the other rows")
    assert not bit_equal(moved[31], gradient[31])


def test_perfect_balance_costs_the_coefficient():
    x = torch.zeros(16, 16)
    counts = torch.full((16,), 4)
    loss = moe.load_balancing_loss(x, counts, total_tokens=16, top_k=4, coefficient=0.5)
    assert abs(loss.item() - 0.5) < 1e-6


def test_invalid_rows_may_hold_anything():
    x = logits()
    valid = torch.arange(50) % 3 > 0
    counts = moe.tokens_per_expert(moe.route(x, top_k=2, renormalize=True)[1], num_experts=16, valid=valid)
    args = {"total_tokens": int(valid.sum()), "top_k": 2, "coefficient": 0.01}
    clean = moe.load_balancing_loss(x[valid], counts, **args)
    x[~valid] = float("nan")
    poisoned = x.clone().requires_grad_()
    loss = moe.load_balancing_loss(poisoned, counts, valid=valid, **args)
    loss.backward()
    same_bits(loss.detach(), clean)
    assert not poisoned.grad.isnan().any() and (poisoned.grad[~valid] == 0).all()


def test_losses_of_two_ranks_add_up_to_the_batch():
    x = logits()
    _, experts = moe.route(x, top_k=2, renormalize=True)
    counts = moe.tokens_per_expert(experts, num_experts=16)
    args = {"total_tokens": 50, "top_k": 2, "coefficient": 1.0}
    parts = [moe.load_balancing_loss(part, counts, **args) for part in (x[:30], x[30:])]
    assert abs(sum(parts) - moe.load_balancing_loss(x, counts, **args)) < 1e-6


def test_bias_moves_towards_the_lacking():
    bias = moe.update_expert_bias(torch.zeros(4), torch.tensor([3, 1, 2, 2]), rate=0.001)
    same_bits(bias, torch.tensor([-0.001, 0.001, 0.0, 0.0]))
    assert not bit_equal(moe.update_expert_bias(nudge(torch.ones(4)), torch.tensor([3, 1, 2, 2]), rate=0.001),
                         moe.update_expert_bias(torch.ones(4), torch.tensor([3, 1, 2, 2]), rate=0.001))  # fmt: skip


def test_bias_compares_integers():
    # fp32 rounds 2**24 + 1 to 2**24: a mean taken there would see no difference.
    counts = torch.tensor([2**24 + 1, 2**24])
    assert moe.update_expert_bias(torch.zeros(2), counts, rate=1.0).tolist() == [-1.0, 1.0]
