"""Combine: ascending expert index inside a group, the balanced tree over groups, shared expert last, one rounding."""

import numpy as np
import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import moe
from isoexec.ops._core.bits import bit_equal, nudge
from isoexec.ops.moe.reference import weighted_total
from tests.ops.op_checks import same_bits

E, GROUPS = 16, 8


def case(T=40, k=4, D=24, seed=0, num_experts=E):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(T, k, D, generator=g).bfloat16()
    weights = torch.rand(T, k, generator=g)
    experts = torch.stack([torch.randperm(num_experts, generator=g)[:k] for _ in range(T)])
    return values, weights, experts


def total(values, weights, experts, shared=None, num_experts=E, groups=GROUPS):
    return weighted_total(values, weights, experts, shared, 0, groups, num_experts // groups, None, None)


def oracle(values, weights, experts, shared=None, num_experts=E, groups=GROUPS, descending=False):
    """The schedule spelled out in scalar fp32 additions."""
    T, k, D = values.shape
    v, w, out = values.float().numpy(), weights.numpy(), np.zeros((T, D), np.float32)
    for t in range(T):
        sums = [np.zeros(D, np.float32) for _ in range(groups)]
        for e, r in sorted(((int(experts[t, r]), r) for r in range(k)), reverse=descending):
            at = e // (num_experts // groups)
            sums[at] = sums[at] + v[t, r] * w[t, r]
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[0::2], sums[1::2])]
        out[t] = sums[0] if shared is None else sums[0] + shared[t].float().numpy()
    return torch.from_numpy(out)


@pytest.mark.parametrize("num_experts, groups", [(16, 8), (16, 1), (16, 16), (60, 4), (10, 2), (9, 1)])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_the_schedule_before_rounding(k, num_experts, groups):
    values, weights, experts = case(k=k, num_experts=num_experts)
    shared = torch.randn(40, 24, generator=torch.Generator().manual_seed(9)).bfloat16()
    got = total(values, weights, experts, shared, num_experts, groups)
    same_bits(got, oracle(values, weights, experts, shared, num_experts, groups))
    rounded = moe.combine(values, weights, experts, shared, num_experts=num_experts, combine_groups=groups)
    same_bits(rounded, got.bfloat16())


def test_order_is_visible_from_four_terms_on():
    for k, visible in ((2, False), (4, True), (8, True)):
        args = case(T=400, k=k)
        # One group: the order of additions is the order of experts.
        same = bit_equal(oracle(*args, groups=1), oracle(*args, groups=1, descending=True))
        assert same != visible


def test_order_of_ranks_does_not_matter():
    values, weights, experts = case(k=8)
    shuffle = torch.argsort(torch.rand(experts.shape, generator=torch.Generator().manual_seed(5)), -1)
    moved = values.gather(1, shuffle[..., None].expand_as(values)), weights.gather(1, shuffle), experts.gather(1, shuffle)
    same_bits(total(*moved), total(values, weights, experts))


def test_shared_expert_is_last():
    values, weights, experts = case(T=400, k=4)
    shared = torch.randn(400, 24, generator=torch.Generator().manual_seed(9)).bfloat16()
    first = oracle(torch.cat([shared[:, None], values], 1), torch.cat([torch.ones(400, 1), weights], 1),
                   torch.cat([torch.full((400, 1), -1), experts], 1) + 1, num_experts=17, groups=1)  # fmt: skip
    got = total(values, weights, experts, shared, groups=1)
    same_bits(got, oracle(values, weights, experts, shared, groups=1))
    assert not bit_equal(got, first)


def test_minus_zero_terms_give_plus_zero():
    values = torch.full((1, 2, 3), -0.0).bfloat16()
    weights, experts = torch.tensor([[0.5, 0.5]]), torch.tensor([[3, 9]])
    for groups in (1, 2, 4, 8, 16):
        same_bits(total(values, weights, experts, groups=groups), torch.zeros(1, 3))
    assert not bit_equal(values[:, 0].float(), torch.zeros(1, 3))  # the sign is there to be lost


def test_subnormal_terms_are_kept():
    values = torch.full((1, 2, 3), 2.0**-120).bfloat16()
    weights = torch.full((1, 2), 2.0**-20)
    for groups in (1, 16):
        got = total(values, weights, torch.tensor([[0, 1]]), groups=groups)
        same_bits(got, torch.full((1, 3), 2.0**-139))


def test_one_ulp_reaches_the_total():
    values, weights, experts = case()
    got = total(values, weights, experts)
    assert not bit_equal(total(nudge(values), weights, experts), got)
    assert not bit_equal(total(values, nudge(weights, weights.argmax()), experts), got)


def test_a_row_does_not_depend_on_its_batch_even_beside_nan():
    values, weights, experts = case(T=65)
    got = total(values, weights, experts)
    for n in (1, 2, 3, 17, 64):
        same_bits(total(values[:n], weights[:n], experts[:n]), got[:n])
    values[64], weights[64] = float("nan"), float("inf")
    same_bits(total(values, weights, experts)[:64], got[:64])


def test_a_pair_of_another_rank_is_left_out_by_selection():
    values, weights, experts = case(k=4)
    away = experts >= 8  # this "rank" holds experts 0..7, groups 0..3
    poisoned = torch.where(away[..., None], float("nan"), values.float()).bfloat16()
    half = weighted_total(poisoned, weights, experts, None, 0, 4, 2, None, None)
    other = weighted_total(values, weights, experts, None, 8, 4, 2, None, None)
    assert not half.isnan().any()
    same_bits(half + other, total(values, weights, experts))


def test_gradients_are_those_of_fp64():
    values, weights, experts = case(T=9)
    shared = torch.randn(9, 24, generator=torch.Generator().manual_seed(9)).bfloat16()
    leaves = [t.clone().requires_grad_() for t in (values, weights, shared)]
    out = torch.randn(9, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    moe.combine(leaves[0], leaves[1], experts, leaves[2], num_experts=E, combine_groups=GROUPS).backward(out)
    wide = [t.double().requires_grad_() for t in (values, weights, shared)]
    ((wide[0] * wide[1][..., None]).sum(1) + wide[2]).backward(out.double())
    for got, expected, bound in zip(leaves, wide, (2**-8, 1e-5, 0.0)):
        assert ((got.grad.double() - expected.grad).abs() <= bound * expected.grad.abs().clamp(min=1.0)).all()
    plain = [t.clone().requires_grad_() for t in (values, weights)]
    moe.combine(*plain, experts, num_experts=E, combine_groups=GROUPS).backward(out)  # no shared expert: the same gradients
    for got, expected in zip(plain, leaves):
        same_bits(got.grad, expected.grad)


def test_no_token():
    values, weights, experts = torch.empty(0, 4, 8).bfloat16(), torch.empty(0, 4), torch.empty(0, 4).long()
    assert moe.combine(values, weights, experts, num_experts=E, combine_groups=GROUPS).shape == (0, 8)


@pytest.mark.parametrize("num_experts, groups", [(4, 8), (60, 8), (6, 4)])
def test_groups_that_do_not_divide_the_experts_are_refused(num_experts, groups):
    with pytest.raises(ContractError, match=f"combine_groups {groups} does not divide the {num_experts} experts"):
        moe.combine(*case(k=2, num_experts=num_experts), num_experts=num_experts, combine_groups=groups)


@pytest.mark.parametrize("num_experts, groups", [(1, 1), (4, 4), (6, 2), (7, 1), (8, 8), (60, 4), (64, 8), (128, 8), (256, 8)])
def test_constant_for_a_model(num_experts, groups):
    assert moe.combine_groups_for(num_experts) == groups


@pytest.mark.parametrize("expert", [-1, E])
def test_an_expert_that_does_not_exist_is_refused(expert):
    values, weights, experts = case(k=2)
    experts[0, 0] = expert
    with pytest.raises(ContractError, match=f"experts: expected ids in 0..{E - 1}"):
        moe.combine(values, weights, experts, num_experts=E, combine_groups=GROUPS)
