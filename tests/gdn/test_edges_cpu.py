"""Convolution, gating and l2norm on the CPU. Values are fp32 that bf16 holds, so results are seen before their rounding."""

import pytest
import torch
import torch.nn.functional as F

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from tests.ops.op_checks import batch_invariant, bf16_values, gradients_close, same_bits

NAN, ONE_BF16_ULP = float("nan"), 1 << 16


def data(lengths, D=24):
    return bf16_values(sum(lengths), D), bf16_values(D, 4)


def conv(x, weight, lengths, starts=None, window=None):
    return gdn.conv1d(x, weight, gdn.Plan(lengths, 16, starts), window)


def conv_by_steps(x, weight, pool=None):
    """One sequence through the engine's decode, in slot 1 of a pool whose other slots hold NaN."""
    if pool is None:
        pool = torch.full((3, 3, x.shape[1]), NAN)
        pool[1] = 0.0
    slots = torch.tensor([1], dtype=torch.int32)
    return torch.cat([gdn.conv1d_step(row[None], weight, pool, slots) for row in x]), pool


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17, 65])
def test_conv_steps_equal_sequence(length):
    x, weight = data([length])
    y, window = conv(x, weight, [length])
    steps, pool = conv_by_steps(x, weight)
    same_bits(steps, y, "steps")
    same_bits(pool[1:2], window, "window")
    assert pool[0].isnan().all() and pool[2].isnan().all()
    same_bits(conv(x.bfloat16(), weight.bfloat16(), [length])[0], y.bfloat16(), "one rounding")


@pytest.mark.parametrize("cut", range(10))
def test_conv_split_and_dirty_window(cut):
    x, weight = data([9])
    y, window = conv(x, weight, [9])
    a, middle = conv(x[:cut], weight, [cut], None, torch.full((1, 3, x.shape[1]), NAN))
    b, last = conv(x[cut:], weight, [9 - cut], [cut], middle)
    same_bits(torch.cat([a, b]), y, "split")
    same_bits(last, window, "window")


def test_conv_packed_and_formula():
    lengths = [5, 0, 1, 9]
    x, weight = data(lengths)
    y, windows = conv(x, weight, lengths)
    for n, (first, length) in enumerate(((0, 5), (5, 0), (5, 1), (6, 9))):
        alone, window = conv(x[first : first + length], weight, [length])
        same_bits(y[first : first + length], alone, "packed")
        same_bits(windows[n : n + 1], window, "window")
    taps = F.pad(x[6:].double(), (0, 0, 3, 0))
    exact = F.silu(sum(taps[j : j + 9] * weight.double()[:, j] for j in range(4)))
    assert float((y[6:].double() - exact).norm() / exact.norm()) < 1e-6


def test_conv_beside_a_sequence_of_nan():
    lengths = [5, 4, 9]
    x, weight = data(lengths)
    clean, windows = conv(x, weight, lengths)
    x[5:9] = NAN
    y, seen = conv(x, weight, lengths)
    for rows in (slice(0, 5), slice(9, None)):
        same_bits(y[rows], clean[rows], "beside NaN")
    same_bits(seen[[0, 2]], windows[[0, 2]], "windows beside NaN")
    assert y[5:9].isnan().all() and seen[1].isnan().all()


def test_conv_subnormals_and_signed_zeros():
    x, weight = torch.full((6, 8), 2.0**-133), torch.zeros(8, 4)
    weight[:, 3] = 1.0
    same_bits(conv(x, weight, [6])[0], x * 0.5, "half of it near 0")
    same_bits(conv_by_steps(x, weight)[0], x * 0.5, "subnormal steps")
    zero, weight = torch.full((6, 8), -0.0), weight + 1.0
    y = conv(zero, weight, [6])[0]
    same_bits(conv_by_steps(zero, weight)[0], y, "signed zeros")
    # What lies before a sequence is +0.0, and -0.0 + 0.0 is +0.0.
    assert y.signbit().all(1).tolist() == [False] * 3 + [True] * 3 and not y[:3].signbit().any()


def test_one_ulp_of_the_convolution_is_seen():
    x, weight = data([12])
    y, _ = conv(x, weight, [12])
    at = 4 * x.shape[1] + int(x[4].abs().argmax())
    moved = conv(nudge(x, at, ONE_BF16_ULP), weight, [12])[0]
    same_bits(moved[[0, 1, 2, 3, 8, 9, 10, 11]], y[[0, 1, 2, 3, 8, 9, 10, 11]], "rows that do not read it")
    assert not bit_equal(moved[4], y[4])
    assert not bit_equal(conv(x, nudge(weight, int(weight.abs().argmax()), ONE_BF16_ULP), [12])[0], y)
    _, pool = conv_by_steps(x[:6], weight)
    step = gdn.conv1d_step(x[6:7], weight, pool.clone(), torch.tensor([1], dtype=torch.int32))
    same_bits(step, y[6:7], "resumed")
    pool[1] = nudge(pool[1], int(pool[1].abs().argmax()), ONE_BF16_ULP)
    assert not bit_equal(gdn.conv1d_step(x[6:7], weight, pool, torch.tensor([1], dtype=torch.int32)), y[6:7])


@pytest.mark.parametrize("lanes", [1, 2, 3, 8, 17])
def test_conv_lanes_do_not_see_each_other(lanes):
    """Slots in any order; inert lanes bring NaN, find NaN in the slot they name, and leave it there."""
    x, weight = data([lanes + 2])
    pool = bf16_values(lanes + 3, 3, x.shape[1])
    slots = (torch.randperm(lanes + 2) + 1).int()
    slots[lanes], slots[lanes + 1] = -1, 0
    x[lanes:], pool[0] = NAN, NAN
    before = pool.clone()
    order = torch.randperm(lanes + 2)
    y = torch.empty_like(x)
    y[order] = gdn.conv1d_step(x[order], weight, pool, slots[order], null_slot=0)
    same_bits(y[lanes:], torch.zeros(2, x.shape[1]), "inert lanes")
    for lane in range(lanes):
        at = int(slots[lane])
        alone = torch.cat([before[at], x[lane : lane + 1]])
        same_bits(y[lane : lane + 1], conv(alone[3:], weight, [1], [9], alone[None, :3])[0], "one lane")
        same_bits(pool[at], alone[1:], "its window")
    untouched = [s for s in range(lanes + 3) if s not in slots[:lanes].tolist()]
    assert_bit_equal(pool[untouched], before[untouched], "other slots")


def gating_case(T=257, HV=4):
    a, b = bf16_values(T, HV, scale=8.0), bf16_values(T, HV, scale=8.0)
    a[3], b[3] = 60.0, -60.0
    return a, b, torch.rand(HV) * 3, torch.randn(HV)


def exact_gating(a, b, A_log, dt_bias):
    return torch.cat([-A_log.exp() * F.softplus(a + dt_bias, threshold=20), torch.sigmoid(b)], -1)


def test_gating_formula_batch_and_control():
    a, b, A_log, dt_bias = gating_case()
    g, beta = gdn.gating(a, b, A_log, dt_bias)
    exact = -A_log.double().exp() * F.softplus((a + dt_bias).double(), threshold=20)
    torch.testing.assert_close(g.double(), exact, rtol=3e-7, atol=1e-30)
    torch.testing.assert_close(beta.double(), torch.sigmoid(b.double()), rtol=3e-7, atol=1e-30)
    batch_invariant(lambda a, b: torch.cat(gdn.gating(a, b, A_log, dt_bias), 1), a, b, what="gating")
    assert not bit_equal(g, gdn.gating(a, b, A_log, nudge(dt_bias, 1, 8))[0])
    assert not bit_equal(g, gdn.gating(a, b, A_log.bfloat16().float(), dt_bias)[0])  # A_log cast to bf16 is another decay


def test_gating_of_subnormals_signed_zeros_and_beside_nan():
    zero = torch.zeros(5, 4)
    g, beta = gdn.gating(zero, zero, zero[0], zero[0])
    for x in (-zero, torch.full((5, 4), 2.0**-133)):
        for found, expected, name in zip(gdn.gating(x, x, zero[0], zero[0]), (g, beta), ("g", "beta")):
            same_bits(found, expected, name)
    far = torch.full((5, 4), -88.0)
    for found, exact in zip(gdn.gating(far, far, zero[0], zero[0]), (-F.softplus(far.double()), torch.sigmoid(far.double()))):
        assert (found != 0).all() and ((found.double() - exact).abs() <= 2.0**-149).all(), "subnormal results are kept"
    a, b, A_log, dt_bias = gating_case(9)
    clean = gdn.gating(a, b, A_log, dt_bias)
    a[4], b[4] = NAN, NAN
    for found, expected, name in zip(gdn.gating(a, b, A_log, dt_bias), clean, ("g", "beta")):
        same_bits(found[[0, 1, 2, 3, 5, 6, 7, 8]], expected[[0, 1, 2, 3, 5, 6, 7, 8]], f"{name} beside NaN")
        assert found[4].isnan().all()


@pytest.mark.parametrize("K", [16, 96, 128])
def test_l2norm(K):
    x = bf16_values(257, 2, K)
    x[4], x[5] = 0.0, 2.0**-133
    y = gdn.l2norm(x)
    exact = x.double() * (x.double().square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    torch.testing.assert_close(y.double(), exact, rtol=1e-6, atol=1e-44)
    assert (y[5] > 0).all(), "a subnormal row is kept"
    batch_invariant(gdn.l2norm, x, what="l2norm")
    same_bits(gdn.l2norm(x.bfloat16()), y.bfloat16(), "one rounding")
    same_bits(gdn.l2norm(torch.full_like(x, -0.0)), torch.full_like(x, -0.0), "negative zeros")
    moved = gdn.l2norm(nudge(x, int(x[0].abs().argmax()), ONE_BF16_ULP))
    same_bits(moved[1:], y[1:], "other rows")
    assert not bit_equal(moved[0], y[0])
    x[7, 1] = NAN
    beside = gdn.l2norm(x)
    assert beside[7, 1].isnan().all()
    same_bits(torch.cat([beside[:7], beside[8:]]), torch.cat([y[:7], y[8:]]), "beside NaN")
    same_bits(beside[7, 0], y[7, 0], "another head of its token")


def exact_conv(x, weight, lengths):
    return F.silu(torch.cat([
        sum(F.pad(part, (0, 0, 3, 0))[j : j + len(part)] * weight[:, j] for j in range(4)) for part in x.split(lengths)
    ]))  # fmt: skip


GRADIENTS = {
    "conv1d": (lambda x, w: conv(x, w, [5, 1, 6])[0], lambda x, w: exact_conv(x, w, [5, 1, 6]), lambda: data([12])),
    "gating": (lambda *x: torch.cat(gdn.gating(*x), -1), exact_gating, lambda: gating_case(40)),
    "l2norm": (gdn.l2norm, lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), lambda: (bf16_values(9, 2, 16),)),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=("fp32", "bf16"))
def test_gradients_are_those_of_fp64(name, dtype, tolerance):
    op, reference, case = GRADIENTS[name]
    inputs = case()
    # A_log and dt_bias are fp32 everywhere; the rest is what the model holds.
    inputs = [x if name == "gating" and i > 1 else x.to(dtype) for i, x in enumerate(inputs)]
    gradients_close(op, reference, inputs, tolerance)
    with pytest.raises(AssertionError, match="relative error"):
        gradients_close(op, lambda *x: reference(*x) * 1.05, inputs, tolerance)


def mixer_case(lengths, H=2, HV=4, K=16, V=8):
    T, D = sum(lengths), 2 * H * K + HV * V
    a, b, A_log, dt_bias = gating_case(T, HV)
    return (bf16_values(T, D), a, b, bf16_values(D, 4), A_log, dt_bias), (H, HV, K, V)


def test_mixer_inputs_are_the_ops_one_after_the_other():
    lengths, starts = [5, 0, 1, 9], [0, 4, 2, 7]
    (x, a, b, *parameters), (H, HV, K, V) = mixer_case(lengths)
    window, plan = bf16_values(4, 3, x.shape[1]), gdn.Plan(lengths, 16, starts)
    y, tail = gdn.conv1d(x, parameters[0], plan, window)
    q, k, v = y.split((H * K, H * K, HV * V), -1)
    expected = *(gdn.l2norm(t.unflatten(-1, (H, K))) for t in (q, k)), v.unflatten(-1, (HV, V)), *gdn.gating(a, b, *parameters[1:]), tail
    found = gdn.mixer_inputs(x, a, b, *parameters, plan, H, HV, K, V, window)
    for name, one, other in zip("q k v g beta window".split(), found, expected, strict=True):
        same_bits(one, other.contiguous(), name)


def test_mixer_steps_equal_the_sequence():
    """Two lanes in shuffled slots beside an inert one that brings NaN."""
    (x, a, b, *parameters), heads = mixer_case([7, 7])
    whole = gdn.mixer_inputs(x, a, b, *parameters, gdn.Plan([7, 7], 16), *heads)
    pool, slots = torch.zeros(4, 3, x.shape[1]), torch.tensor([3, 0, 1], dtype=torch.int32)
    pool[0] = NAN
    for t in range(7):
        rows = [torch.stack([s[t], torch.full_like(s[t], NAN), s[7 + t]]) for s in (x, a, b)]
        step = gdn.mixer_step_inputs(*rows, *parameters, pool, slots, *heads, null_slot=0)
        for name, one, other in zip("q k v g beta".split(), step, whole[:5], strict=True):
            same_bits(one[[0, 2]], other[[t, 7 + t]], f"{name} of step {t}")
        assert all((part[1] == 0).all() for part in step[:3]), "an inert lane's q, k and v"
    same_bits(pool[[3, 1]], whole[5], "windows")
    assert pool[0].isnan().all()
