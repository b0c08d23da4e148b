"""Mixture of experts on a GPU: plan, grouped products in every form, router, combine."""

import os

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import moe
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.activation import triton as activation
from isoexec.ops.matmul import triton as products
from isoexec.ops.moe import gpu, reference, triton_combine, triton_grouped, triton_plan

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
E, F, D, TOP = (4, 32, 48, 2) if INTERPRET else (16, 192, 512, 4)
FORMS = {name: form for name, form in zip(("16", "32", "64", "128"), triton_grouped.FORMS.values())}


def choose(T, k=TOP, experts=E, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=g)[:k] for _ in range(T)])


@pytest.fixture
def weights(random):
    if INTERPRET:  # whole numbers, gates so large that their sigmoid is 1: every sum is exact, whatever numpy's order
        whole = lambda *shape: (random(*shape) * 2).round()  # noqa: E731
        gate = whole(E, F, D).abs() + 1
        return torch.cat([gate, whole(E, F, D)], 1), whole(E, D, F).clamp(-1, 1)
    return random(E, 2 * F, D, scale=D**-0.5), random(E, D, F, scale=F**-0.5)


def tokens(random, T):
    return random(T, D).abs().round() + 1 if INTERPRET else random(T, D)


def by_form(x, experts, weights, form):
    """(gate and up, h, values) by pair, gate, up and values in fp32 before their rounding, h rounded as the second product reads it."""
    plan = triton_plan.make(experts, 0, E, form.gate_up.rows)
    _, exact = triton_grouped.gate_up(x, weights[0], plan, form.gate_up, True, torch.float32)
    h, rounded = triton_grouped.gate_up(x, weights[0], plan, form.gate_up, True)
    values = torch.zeros(experts.numel(), D, dtype=torch.float32, device=x.device)
    triton_grouped.rows(h, weights[1], plan, form.down, scatter=values)
    place = plan.place.long()
    assert_bit_equal(exact[place].to(x.dtype), rounded[place], "gate and up, rounded")
    return exact[place], h[place], values


@pytest.mark.parametrize("T,k,experts,first,held", [(1, 4, 8, 0, 8), (37, 8, 16, 0, 16), (100, 4, 60, 0, 60), (33, 4, 16, 4, 8)])
def test_plan_is_a_stable_sort(device, T, k, experts, first, held):
    chosen = choose(T, k, experts)
    plan = triton_plan.make(chosen.to(device), first, held, 16)
    local = chosen.flatten() - first
    local = torch.where((local >= 0) & (local < held), local, held)
    counts = local.bincount(minlength=held + 1)[:held]
    order = local.argsort(stable=True)[: counts.sum()]
    assert plan.pair[: len(order)].tolist() == order.tolist()
    place = torch.full_like(local, -1)
    place[order] = torch.arange(len(order))
    assert plan.place.tolist() == place.tolist()
    assert plan.totals[:held].tolist() == counts.tolist() and plan.starts[:held].tolist() == (counts.cumsum(0) - counts).tolist()
    want = []
    for e, (start, n) in enumerate(zip((counts.cumsum(0) - counts).tolist(), counts.tolist())):
        want += [(e, start + r, start + n) for r in range(0, n, 16)]
    assert int(plan.count) == len(want) <= plan.tiles.shape[1]
    assert list(zip(*plan.tiles[:, : len(want)].tolist())) == want


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_has_the_bits_of_dense_products_alone(random, device, weights, form):
    T = 21 if INTERPRET else 333
    x, experts = tokens(random, T), choose(T).to(device)
    exact, h, values = by_form(x, experts, weights, FORMS[form])
    dense = lambda a, w: products.product(a, w, torch.float32, tiles=products.SMALL)  # noqa: E731
    for e in range(E):
        pairs = (experts.flatten() == e).nonzero()[:, 0]
        if len(pairs):
            want = dense(x[pairs // TOP], weights[0][e])
            assert_bit_equal(exact[pairs], want, f"gate and up of expert {e}")
            want = activation.silu_mul(want.to(x.dtype))
            assert_bit_equal(h[pairs], want, f"silu(gate) * up of expert {e}")
            assert_bit_equal(values[pairs], dense(want, weights[1][e]), f"values of expert {e}")
    got = gpu.expert_mlp(x, experts, *weights)
    assert_bit_equal(values.to(x.dtype).view(T, TOP, D), got, "the public op, rounded")
    moved = nudge(weights[0], int(experts[0, 0]) * 2 * F * D, 40)
    assert not bit_equal(gpu.expert_mlp(x, experts, moved, weights[1]), got)


def test_forms_have_the_same_bits_before_rounding(random, device, weights):
    T = 13 if INTERPRET else 500
    x, experts = tokens(random, T), choose(T, seed=5).to(device)
    first, *others = (by_form(x, experts, weights, form) for form in FORMS.values())
    for other in others:
        for what, a, b in zip(("gate and up before rounding", "silu(gate) * up", "down before rounding"), other, first):
            assert_bit_equal(a, b, what)
            assert not bit_equal(nudge(a), b)


def test_a_row_does_not_depend_on_its_batch(random, device, weights):
    T = 20 if INTERPRET else 4096
    x, experts = tokens(random, T), choose(T, seed=1).to(device)
    whole = gpu.expert_mlp(x, experts, *weights)
    for n in (1, 2, 17) if INTERPRET else (1, 2, 3, 8, 17, 64, 65, 200, 1000):
        assert_bit_equal(gpu.expert_mlp(x[:n], experts[:n], *weights), whole[:n], f"{n} rows")
    order = torch.randperm(T, generator=torch.Generator().manual_seed(2)).to(device)
    assert_bit_equal(gpu.expert_mlp(x[order], experts[order], *weights), whole[order], "another order")
    alone = torch.full((T, 1), 3, device=device)
    assert_bit_equal(gpu.expert_mlp(x, alone, *weights)[:5], gpu.expert_mlp(x[:5], alone[:5], *weights), "all to one expert")
    x[-1] = torch.nan
    assert_bit_equal(gpu.expert_mlp(x, experts, *weights)[:-1], whole[:-1], "beside NaN")


def test_experts_that_are_not_held_or_not_asked_move_nothing(random, device, weights):
    T = 12 if INTERPRET else 200
    x, experts = tokens(random, T), choose(T).to(device)
    whole = gpu.expert_mlp(x, experts, *weights)
    half = [w[: E // 2].contiguous() for w in weights]
    held = experts < E // 2
    values = gpu._Experts.apply(x, experts, 0, E, *half)
    assert_bit_equal(values[held], whole[held], "held")
    assert_bit_equal(values[~held], torch.zeros_like(values[~held]), "not held")
    poisoned = [torch.cat([half[0], torch.full_like(half[0], torch.nan)]), torch.cat([half[1], torch.full_like(half[1], torch.nan)])]
    few = torch.where(held, experts, 0)
    assert_bit_equal(gpu.expert_mlp(x, few, *poisoned), gpu.expert_mlp(x, few, *weights), "experts without tokens")
    apart = [list(w.unbind()) for w in weights], [[t.clone() for t in w] for w in weights]
    for separate in apart:
        assert_bit_equal(gpu.expert_mlp(x, experts, *separate), whole, "separate weights")


@pytest.mark.parametrize("T", [9] if INTERPRET else [40, 3000])
def test_gradients_are_near_those_of_fp64_and_repeat(random, device, T):
    x, experts = random(T, D), choose(T).to(device)
    weights, grad = (random(E, 2 * F, D, scale=D**-0.5), random(E, D, F, scale=F**-0.5)), random(T, TOP, D)
    runs = []
    for _ in range(2):
        leaves = [t.detach().clone().requires_grad_() for t in (x, *weights)]
        runs.append(torch.autograd.grad(gpu.expert_mlp(leaves[0], experts, *leaves[1:]), leaves, grad))
    for a, b in zip(*runs):
        assert_bit_equal(a, b, "gradient of a second run")
    wide = [t.detach().double().requires_grad_() for t in (x, *weights)]
    total = 0.0
    for e in range(E):
        t, r = (experts == e).nonzero(as_tuple=True)
        gate, up = (wide[0][t] @ wide[1][e].T).chunk(2, -1)
        total = total + ((torch.nn.functional.silu(gate) * up @ wide[2][e].T) * grad[t, r].double()).sum()
    for name, got, want in zip(("x", "gate_up", "down"), runs[0], torch.autograd.grad(total, wide)):
        assert (got.double() - want).norm() <= 1e-2 * want.norm(), name
    leaves = [[w.clone().requires_grad_() for w in each] for each in weights]
    apart = torch.autograd.grad(gpu.expert_mlp(x, experts, *leaves), [*leaves[0], *leaves[1]], grad)
    assert_bit_equal(torch.stack(apart[:E]), runs[0][1], "separate weights")
    assert_bit_equal(torch.stack(apart[E:]), runs[0][2], "separate weights")


def test_no_token_and_wrong_widths(device, weights):
    x = torch.empty(0, D, dtype=torch.bfloat16, device=device, requires_grad=True)
    leaves = [w.clone().requires_grad_() for w in weights]
    values = gpu.expert_mlp(x, torch.empty(0, TOP, dtype=torch.int64, device=device), *leaves)
    assert values.shape == (0, TOP, D)
    assert all((g == 0).all() for g in torch.autograd.grad(values.sum(), leaves))
    with pytest.raises(ContractError, match="multiples of 16"):
        gpu.expert_mlp(torch.empty(2, D - 8, dtype=torch.bfloat16, device=device), choose(2).to(device), weights[0][..., :-8], weights[1])


@pytest.mark.parametrize("experts,k,groups", [(16, 4, 8), (60, 8, 4), (10, 1, 2), (9, 4, 1), (256, 8, 8)])
def test_combine_has_the_bits_of_the_cpu_backend(random, device, experts, k, groups):
    T, width = (2, 72) if INTERPRET else (25, 2056)
    values, w, chosen = random(T, k, width), random(T, k, dtype=torch.float32).abs(), choose(T, k, experts)
    values[-1] = -0.0
    for shared in (None, random(T, width)):
        host = values.cpu(), w.cpu(), chosen, None if shared is None else shared.cpu()
        want = reference.weighted_total(*host, 0, groups, experts // groups, None, None)
        got = triton_combine.total(values, w, chosen.to(device), shared, 0, groups, experts // groups, torch.float32)
        assert_bit_equal(got.cpu(), want, "before rounding")
        rounded = gpu.combine(values, w, chosen.to(device), shared, num_experts=experts, combine_groups=groups)
        assert_bit_equal(rounded.cpu(), want.bfloat16(), "rounded")
    assert not bit_equal(triton_combine.total(values, nudge(w, 0), chosen.to(device), shared, 0, groups, experts // groups, torch.float32).cpu(), want)
    half, rest = groups // 2, groups - groups // 2
    if half:  # two ranks: each its own subtree, what the other holds is not read
        away = (chosen >= experts // 2).to(device)
        poisoned = values.masked_fill(away.unsqueeze(-1), torch.nan)
        parts = [triton_combine.total(v, w, chosen.to(device), None, at, n, experts // groups, torch.float32)
                 for v, at, n in ((poisoned, 0, half), (values, experts // 2, rest))]  # fmt: skip
        want = reference.weighted_total(*host[:3], None, 0, groups, experts // groups, None, None)
        assert_bit_equal((parts[0] + parts[1]).cpu(), want, "two ranks")


def test_combine_gradients(random, device):
    leaves = [random(6, 4, 72).requires_grad_(), random(6, 4, dtype=torch.float32).requires_grad_(), random(6, 72).requires_grad_()]
    chosen, grad = choose(6, 4, 16).to(device), random(6, 72)
    got, again = (torch.autograd.grad(gpu.combine(*leaves[:2], chosen, leaves[2], num_experts=16, combine_groups=8), leaves, grad) for _ in range(2))
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad((wide[0] * wide[1][..., None]).sum(1) + wide[2], wide, grad.double())
    for g, second, w, bound in zip(got, again, want, (2**-8, 1e-5, 0.0)):
        assert (g - w).abs().max() <= bound * w.abs().max()
        assert_bit_equal(g, second, "gradient of a second run")


ROUTERS = [
    dict(experts=16, top_k=4, renormalize=True),
    dict(experts=60, top_k=8, renormalize=False),
    dict(experts=256, top_k=8, renormalize=True),
    dict(experts=64, top_k=4, renormalize=True, scoring="sigmoid", scale=1.8, bias=True),
    dict(experts=32, top_k=4, renormalize=True, scoring="sigmoid", bias=True, n_group=8, topk_group=3),
    dict(experts=7, top_k=1, renormalize=True),
]


@pytest.mark.parametrize("case", ROUTERS, ids=lambda c: f"{c['experts']}-{c['top_k']}-{c.get('scoring', 'softmax')}-{c.get('n_group', 1)}")
def test_route(random, device, case):
    case = dict(case)
    experts, bias = case.pop("experts"), case.pop("bias", False)
    T = 8 if INTERPRET else 33
    logits = random(T, experts, dtype=torch.float32, scale=2.0)
    logits[5] = 1.0  # ties
    logits[6, ::2] = 3.0
    case["expert_bias"] = random(experts, dtype=torch.float32, scale=0.1) if bias else None
    weights, chosen = gpu.route(logits, **case)
    host = dict(case, expert_bias=None if not bias else case["expert_bias"].cpu())
    want, wanted = reference.route(logits.cpu(), **host)
    assert chosen.tolist() == wanted.tolist()
    assert ((weights.cpu() - want).abs() <= 2e-6 * want.abs()).all()
    for n in (1, T - 2):
        some = gpu.route(logits[n:], **case)
        assert_bit_equal(some[0], weights[n:], "another batch")
        assert_bit_equal(some[1], chosen[n:], "another batch")
    moved = logits.clone()
    moved[0, chosen[0, 0]] += 0.01
    assert case["top_k"] == 1 or not bit_equal(gpu.route(moved, **case)[0][0], weights[0])
    logits[-1, 1] = torch.nan
    broken = gpu.route(logits, **case)
    assert_bit_equal(broken[0][:-1], weights[:-1], "beside NaN")
    nan, lowest = reference.route(logits[-1:].cpu(), **host)
    assert broken[1][-1:].tolist() == lowest.tolist() and broken[0][-1:].isnan().tolist() == nan.isnan().tolist()


@pytest.mark.parametrize("case", ROUTERS[:5], ids=lambda c: f"{c['experts']}-{c['top_k']}-{c.get('scoring', 'softmax')}-{c.get('n_group', 1)}")
def test_route_gradients(random, device, case):
    case = dict(case)
    experts, _ = case.pop("experts"), case.pop("bias", False)
    logits = random(5, experts, dtype=torch.float32, scale=2.0).requires_grad_()
    grad = random(5, case["top_k"], dtype=torch.float32)
    got, again = (torch.autograd.grad(gpu.route(logits, **case)[0], logits, grad)[0] for _ in range(2))
    assert_bit_equal(got, again, "gradient of a second run")
    host = logits.detach().cpu().requires_grad_()
    (want,) = torch.autograd.grad(reference.route(host, **case)[0], host, grad.cpu())
    assert (got.cpu() - want).abs().max() <= 1e-5 * want.abs().max()


def test_route_refuses_what_the_cpu_backend_refuses(random):
    logits = random(2, 8, dtype=torch.float32)
    for wrong in (dict(top_k=9), dict(top_k=0), dict(top_k=2, scoring="other"), dict(top_k=2, expert_bias=logits[0]), dict(top_k=2, n_group=2)):
        with pytest.raises(ContractError, match="moe.route"):
            moe.route(logits, renormalize=True, **wrong)


def test_tokens_per_expert(device):
    chosen, valid = choose(50, 4, 16).to(device), torch.arange(50, device=device) % 3 > 0
    assert gpu.tokens_per_expert(chosen, num_experts=16).tolist() == chosen.flatten().cpu().bincount(minlength=16).tolist()
    want = chosen[valid].flatten().cpu().bincount(minlength=16)
    assert gpu.tokens_per_expert(chosen, num_experts=16, valid=valid).tolist() == want.tolist()


def test_a_step_is_captured_without_a_host_read(random, hardware, weights):
    x = tokens(random, 64)
    router = random(E, D, scale=D**-0.5)

    def step():
        w, chosen = gpu.route(gpu.router_logits(x, router), top_k=TOP, renormalize=True)
        return gpu.combine(gpu.expert_mlp(x, chosen, *weights), w, chosen, x, num_experts=E, combine_groups=8)

    want = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    got.zero_()
    graph.replay()
    assert_bit_equal(got, want, "replayed")
    x.copy_(x.roll(1, 0))
    graph.replay()
    assert_bit_equal(got, step(), "replayed on other tokens")
