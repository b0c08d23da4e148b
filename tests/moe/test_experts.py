"""Grouped expert MLP: an expert's rows have the bits that its own products give, whoever is beside them."""

import pytest
import torch

from isoexec.ops import activation, matmul, moe
from isoexec.ops._core.bits import bit_equal, nudge
from isoexec.ops.moe.grouped import grouped_product
from tests.ops.op_checks import same_bits

E, D, F = 8, 48, 80


@pytest.fixture(scope="module")
def weights():
    g = torch.Generator().manual_seed(1)
    return (torch.randn(E, 2 * F, D, generator=g) / 8).bfloat16(), (torch.randn(E, D, F, generator=g) / 8).bfloat16()


def case(T=70, k=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=g).bfloat16()
    return x, torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(T)])


def pair_by_pair(x, experts, gate_up, down):
    """Each pair alone, through the dense ops."""
    rows = [
        matmul.linear(activation.silu_mul(matmul.linear(x[t : t + 1], gate_up[e])), down[e])
        for t, chosen in enumerate(experts.tolist())
        for e in chosen
    ]
    return torch.cat(rows).view(*experts.shape, D)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_pair_has_the_bits_of_the_dense_ops_alone(weights, k):
    x, experts = case(T=70, k=k)
    values = moe.expert_mlp(x, experts, *weights)
    same_bits(values, pair_by_pair(x, experts, *weights))
    assert not bit_equal(moe.expert_mlp(x, experts, nudge(weights[0], D * 2 * F * int(experts[0, 0])), weights[1]), values)


@pytest.mark.parametrize("T", [1, 31, 33, 257])
def test_all_tokens_to_one_expert(weights, T):
    x, _ = case(T)
    values = moe.expert_mlp(x, torch.full((T, 1), 5), *weights)
    dense = matmul.linear(activation.silu_mul(matmul.linear(x, weights[0][5])), weights[1][5])
    same_bits(values[:, 0], dense)


def test_an_expert_without_tokens_moves_nothing(weights):
    x, experts = case(k=2)
    experts[experts == 3] = 2
    poisoned = [w.clone() for w in weights]
    for w in poisoned:
        w[3] = float("nan")
    same_bits(moe.expert_mlp(x, experts, *poisoned), moe.expert_mlp(x, experts, *weights))


def test_a_row_does_not_depend_on_its_batch(weights):
    x, experts = case(T=257)
    whole = moe.expert_mlp(x, experts, *weights)
    for n in (1, 2, 3, 8, 17, 64):
        same_bits(moe.expert_mlp(x[:n], experts[:n], *weights), whole[:n])
    order = torch.randperm(257, generator=torch.Generator().manual_seed(2))
    same_bits(moe.expert_mlp(x[order], experts[order], *weights), whole[order])


def test_nan_rows_stay_alone(weights):
    x, experts = case(T=66)
    clean = moe.expert_mlp(x[:65], experts[:65], *weights)
    x[65] = float("nan")
    values = moe.expert_mlp(x, experts, *weights)
    same_bits(values[:65], clean)
    assert values[65].isnan().all()


def test_stacked_and_separate_weights_agree(weights):
    x, experts = case()
    stacked = [w.clone().requires_grad_() for w in weights]
    apart = [[w.clone().requires_grad_() for w in each] for each in weights]
    a, b = moe.expert_mlp(x, experts, *stacked), moe.expert_mlp(x, experts, *apart)
    same_bits(a.detach(), b.detach())
    a.float().sum().backward()
    b.float().sum().backward()
    for one, many in zip(stacked, apart):
        same_bits(one.grad, torch.stack([w.grad for w in many]))


def test_no_token(weights):
    apart = [[w.clone().requires_grad_() for w in each] for each in weights]
    x = torch.empty(0, D, dtype=torch.bfloat16, requires_grad=True)
    values = moe.expert_mlp(x, torch.empty(0, 2, dtype=torch.int64), *apart)
    assert values.shape == (0, 2, D)
    values.sum().backward()
    assert all((w.grad == 0).all() for each in apart for w in each)


def test_gradients_are_near_those_of_fp64_and_repeat(weights):
    x, experts = case(T=40)
    out = torch.randn(40, 4, D, generator=torch.Generator().manual_seed(4)).bfloat16()
    runs = []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        moe.expert_mlp(leaves[0], experts, *leaves[1:]).backward(out)
        runs.append([t.grad for t in leaves])
    for a, b in zip(*runs):
        same_bits(a, b)
    wide = [t.double().requires_grad_() for t in (x, *weights)]
    gate, up = torch.einsum("td,tkfd->tkf", wide[0], wide[1][experts]).chunk(2, -1)
    h = torch.nn.functional.silu(gate) * up
    torch.einsum("tkf,tkdf->tkd", h, wide[2][experts]).backward(out.double())
    for got, t in zip(runs[0], wide):
        scale = t.grad.abs().mean()
        assert (got.double() - t.grad).abs().mean() < 0.01 * scale and scale > 1e-3


def test_batched_and_single_products_have_the_same_bits():
    """Both sides of the size limit, K and N that are not multiples of the tile, experts of 0 to 70 rows."""
    g = torch.Generator().manual_seed(6)
    counts = [0, 1, 70, 0, 32, 33, 5, 0]
    rows = torch.randn(sum(counts), 1040, generator=g).bfloat16()
    w = torch.randn(8, 200, 1040, generator=g).bfloat16()
    few = grouped_product(rows, counts, w)
    assert sum(-(-n // 32) for n in counts) * 200 * 1040 < 1 << 22
    more = torch.cat([w, torch.zeros(8, 200, 1040).bfloat16(), torch.ones(16, 200, 1040).bfloat16()])
    many = grouped_product(torch.cat([rows, rows[:24]]), [*counts, *[1] * 24], more)
    assert 32 * 200 * 1040 > 1 << 22
    same_bits(many[: len(rows)], few)
    same_bits(grouped_product(rows, counts, list(w)), few)
    assert not bit_equal(grouped_product(rows, counts, nudge(w, int(w[2].abs().argmax()) + 2 * 200 * 1040)), few)


def test_a_token_that_chose_nothing_held_gets_plus_zero(weights):
    x, experts = case()
    values = moe.expert_mlp(x, experts, weights[0][:4], weights[1][:4])  # experts 4..7 are elsewhere
    held = experts < 4
    same_bits(values[held], moe.expert_mlp(x, experts, *weights)[held])
    same_bits(values[~held], torch.zeros_like(values[~held]))
