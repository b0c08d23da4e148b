"""Router: top-k with a stated tie rule (case 31), order by rank, weights, gradients."""

import itertools

import numpy as np
import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import moe
from isoexec.ops._core.bits import bit_equal, nudge
from tests.ops.op_checks import same_bits

NAN, INF = float("nan"), float("inf")


def logits(T=64, E=16, seed=0):
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) * 2


def softmax64(x):
    return torch.softmax(x.double(), -1)


@pytest.mark.parametrize("E", [1, 2, 7, 16, 60, 128, 256])
def test_softmax_weights_are_accurate_and_sorted(E):
    x = logits(E=E)
    k = min(E, 8)
    weights, experts = moe.route(x, top_k=k, renormalize=False)
    expected, order = softmax64(x).sort(-1, descending=True)
    assert (weights.double() / expected[:, :k] - 1).abs().max() < 1e-6
    assert (experts == order[:, :k]).all()  # random fp32 logits have no ties
    assert weights.dtype == torch.float32 and experts.dtype == torch.int64


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_ties_go_to_the_lowest_index(top_k):
    x = torch.zeros(3, 16)
    x[1, ::2] = 1.0  # eight winners, tied
    x[2, 5] = x[2, 11] = 2.0
    _, experts = moe.route(x, top_k=top_k, renormalize=True)
    assert experts[0].tolist() == list(range(top_k))
    assert experts[1].tolist() == list(range(0, 16, 2))[:top_k]
    assert experts[2].tolist() == [5, 11, *[e for e in range(16) if e not in (5, 11)]][:top_k]


def test_a_tie_survives_every_permutation_of_the_batch_around_it():
    x = logits(8, 8)
    x[:, 2] = x[:, 6] = x.max() + 1
    for rows in itertools.islice(itertools.permutations(range(8)), 0, 5000, 617):
        _, experts = moe.route(x[list(rows)], top_k=2, renormalize=True)
        assert experts.tolist() == [[2, 6]] * 8


def test_minus_zero_equals_zero():
    x = torch.full((1, 4), -1.0)
    x[0, 1], x[0, 2] = -0.0, 0.0
    weights, experts = moe.route(x, top_k=2, renormalize=False)
    assert experts.tolist() == [[1, 2]]
    same_bits(weights[:, 0], weights[:, 1])
    swapped, experts = moe.route(x[:, [0, 2, 1, 3]], top_k=2, renormalize=False)
    assert experts.tolist() == [[1, 2]]
    same_bits(weights, swapped)


def test_minus_zero_equals_zero_in_biased_selection():
    # sigmoid(-200) is +0.0 and +0.0 + -0.0 is +0.0, so a zero of either sign is reached through rank() itself.
    from isoexec.ops.moe.reference import rank

    assert rank(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 4).tolist() == [[0, 1, 2, 3]]


def test_nan_stays_in_its_row():
    x = logits(5, 8)
    x[2, 3] = NAN
    clean, chosen = moe.route(x[[0, 1, 3, 4]], top_k=4, renormalize=True)
    weights, experts = moe.route(x, top_k=4, renormalize=True)
    assert experts[2].tolist() == [0, 1, 2, 3] and weights[2].isnan().all()
    same_bits(weights[[0, 1, 3, 4]], clean)
    same_bits(experts[[0, 1, 3, 4]], chosen)


def test_nan_score_ranks_below_every_number():
    x = torch.tensor([[0.0, NAN, -1.0, 1.0]])
    _, experts = moe.route(x, top_k=4, renormalize=False, scoring="sigmoid")
    assert experts.tolist() == [[3, 0, 2, 1]]


def test_infinite_logits():
    weights, experts = moe.route(torch.tensor([[-INF, 0.0, -INF, -INF], [INF, 0.0, 1.0, 2.0]]), top_k=2, renormalize=True)
    assert experts.tolist() == [[1, 0], [0, 1]]
    assert weights[0].tolist() == [1.0, 0.0]
    assert weights[1].isnan().all()  # inf - inf: the same rule as NaN


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_order_by_rank_with_gradients_on_and_off(top_k, scoring):
    x = logits()
    on = moe.route(x.clone().requires_grad_(), top_k=top_k, renormalize=False, scoring=scoring)
    with torch.no_grad():
        off = moe.route(x, top_k=top_k, renormalize=False, scoring=scoring)
    for a, b in zip(on, off):
        same_bits(a.detach(), b)
    assert (off[0][:, 1:] <= off[0][:, :-1]).all()


def test_renormalisation_sums_in_rank_order():
    raw, _ = moe.route(logits(256, 32), top_k=8, renormalize=False)
    weights, _ = moe.route(logits(256, 32), top_k=8, renormalize=True)

    def normalised(order):
        total = np.float32(0) + raw[:, order[0]].numpy()
        for r in order[1:]:
            total = total + raw[:, r].numpy()
        return torch.from_numpy(raw.numpy() / total[:, None])

    same_bits(weights, normalised(range(8)))
    assert not bit_equal(weights, normalised(range(7, -1, -1)))  # the order is visible


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_row_does_not_depend_on_its_batch(scoring):
    x = logits(257, 60)
    whole = moe.route(x, top_k=8, renormalize=True, scoring=scoring)
    for n in (1, 2, 3, 8, 17, 64, 256):
        part = moe.route(x[:n], top_k=8, renormalize=True, scoring=scoring)
        same_bits(part[0], whole[0][:n])
        same_bits(part[1], whole[1][:n])
    alone = moe.route(x[200:201], top_k=8, renormalize=True, scoring=scoring)
    same_bits(alone[0], whole[0][200:201])
    moved = nudge(x, x[0].argmax(), 1 if scoring == "softmax" else 256)  # sigmoid contracts: one ulp of a logit is lost in it
    assert not bit_equal(moe.route(moved, top_k=8, renormalize=True, scoring=scoring)[0], whole[0])


def test_one_ulp_decides_a_tie():
    x = torch.full((1, 8), 0.5)
    assert moe.route(x, top_k=2, renormalize=True, scoring="sigmoid")[1].tolist() == [[0, 1]]
    bias = nudge(torch.full((8,), 0.25), 6)
    assert moe.route(x, top_k=2, renormalize=True, scoring="sigmoid", expert_bias=bias)[1].tolist() == [[6, 0]]


def test_sigmoid_bias_selects_and_does_not_weigh():
    x, bias = logits(), torch.zeros(16)
    bias[13] = 100.0
    weights, experts = moe.route(x, top_k=4, renormalize=True, scoring="sigmoid", expert_bias=bias, scale=1.8)
    assert (experts[:, 0] == 13).all()
    score = torch.sigmoid(x.double()).gather(1, experts)
    assert (weights.double() - 1.8 * score / score.sum(-1, keepdim=True)).abs().max() < 1e-6


def reference_groups(x, bias, n_group, topk_group, top_k):
    """Chosen experts by the definition, in fp64 and Python."""
    key, chosen, size = torch.sigmoid(x.double()) + bias.double(), [], x.shape[1] // n_group
    for row in key.tolist():
        group = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
        kept = sorted(range(n_group), key=lambda g: -group[g])[:topk_group]
        chosen.append(sorted((e for g in kept for e in range(g * size, (g + 1) * size)), key=lambda e: -row[e])[:top_k])
    return chosen


@pytest.mark.parametrize("n_group, topk_group, top_k", [(2, 1, 4), (4, 2, 4), (4, 4, 8), (8, 3, 6)])
def test_groups_limit_the_choice(n_group, topk_group, top_k):
    x, bias = logits(64, 16), logits(1, 16, seed=1)[0] / 8
    arguments = dict(top_k=top_k, renormalize=True, scoring="sigmoid", expert_bias=bias)
    weights, experts = moe.route(x, **arguments, n_group=n_group, topk_group=topk_group)
    assert experts.tolist() == reference_groups(x, bias, n_group, topk_group, top_k)
    free = moe.route(x, **arguments)
    assert bit_equal(weights, free[0]) == (n_group == topk_group) and (experts == free[1]).all() == (n_group == topk_group)
    for n in (1, 17):
        part = moe.route(x[:n], **arguments, n_group=n_group, topk_group=topk_group)
        same_bits(part[0], weights[:n])
        same_bits(part[1], experts[:n])


def test_tied_groups_go_to_the_lowest_index_and_one_ulp_decides():
    x, arguments = torch.zeros(1, 8), dict(top_k=2, renormalize=True, scoring="sigmoid", n_group=4, topk_group=1)
    assert moe.route(x, **arguments)[1].tolist() == [[0, 1]]
    assert moe.route(x, expert_bias=nudge(torch.full((8,), 0.25), 5, 4), **arguments)[1].tolist() == [[5, 4]]


def test_nan_keeps_a_group_from_being_chosen():
    x = torch.zeros(2, 8)
    x[0, 1] = NAN
    weights, experts = moe.route(x, top_k=2, renormalize=True, scoring="sigmoid", n_group=4, topk_group=1)
    assert experts.tolist() == [[2, 3], [0, 1]] and not weights.isnan().any()


def test_sigmoid_scores_of_zero_give_no_nan():
    weights, experts = moe.route(torch.full((1, 4), -300.0), top_k=2, renormalize=True, scoring="sigmoid")
    assert experts.tolist() == [[0, 1]] and weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("scoring, renormalize", [("softmax", True), ("softmax", False), ("sigmoid", True), ("sigmoid", False)])
def test_gradient_is_that_of_fp64(scoring, renormalize):
    x = logits(16, 12).requires_grad_()
    out = torch.randn(16, 4, generator=torch.Generator().manual_seed(3))
    weights, experts = moe.route(x, top_k=4, renormalize=renormalize, scoring=scoring, scale=1.5)
    weights.backward(out)
    y = x.detach().double().requires_grad_()
    score = (torch.softmax(y, -1) if scoring == "softmax" else torch.sigmoid(y)).gather(1, experts)
    score = score / score.sum(-1, keepdim=True) if renormalize else score
    (1.5 * score).backward(out.double())
    assert (x.grad.double() - y.grad).abs().max() < 1e-6
    assert y.grad.abs().max() > 1e-3


def test_no_token():
    weights, experts = moe.route(torch.empty(0, 8), top_k=2, renormalize=True)
    assert weights.shape == experts.shape == (0, 2)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"scoring": "tanh"}, "'tanh'"),
        ({"top_k": 0}, "1..16"),
        ({"top_k": 17}, "1..16"),
        ({"expert_bias": torch.zeros(16)}, "expert_bias"),
        ({"n_group": 4}, "scoring 'sigmoid'"),
        ({"scoring": "sigmoid", "n_group": 3}, "n_group 3"),
        ({"scoring": "sigmoid", "n_group": 16}, "n_group 16"),
        ({"scoring": "sigmoid", "n_group": 8, "topk_group": 9}, "topk_group 9"),
        ({"scoring": "sigmoid", "n_group": 8, "topk_group": 1, "top_k": 3}, "top_k 3"),
    ],
)
def test_refusals_name_what_is_wrong(change, says):
    with pytest.raises(ContractError, match="moe.route") as error:
        moe.route(logits(), **{"top_k": 2, "renormalize": True, **change})
    assert says in str(error.value)


def test_logits_are_fp32_products_of_bf16_operands():
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(33, 96, generator=g).bfloat16(), torch.randn(60, 96, generator=g).bfloat16()
    y = moe.router_logits(x, w)
    assert y.dtype == torch.float32
    assert (y.double() - x.double() @ w.double().T).abs().max() < 1e-4
    same_bits(moe.router_logits(x[20:21], w), y[20:21])
    assert not bit_equal(moe.router_logits(nudge(x, 96 * 20), w)[20:21], y[20:21])
