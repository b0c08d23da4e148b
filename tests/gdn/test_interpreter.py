"""The Triton kernels under the interpreter: the same parity without a GPU, in processes of their own (TRITON_INTERPRET=1)."""

import os
import subprocess
import sys
import textwrap

import pytest

PROLOGUE = """
import tests.gdn.interpreter
import torch
from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.gdn import cpu, launch, triton_core, triton_cpr, triton_decode, triton_edges, reference_conv
from tests.gdn.cases import F32, Engine, assert_same_state, dirty_pool, inputs, relative
reference = gdn.cpr_wy
# One BV everywhere: the interpreter multiplies with the host's library, whose bits depend on the tile's shape.
for kernel in ("chain", "chain_narrow", "decode", "decode_main", "decode_gated"):
    launch.TABLE[kernel]["16"] = {**launch.TABLE[kernel]["16"], "BV": 32}
gdn.cpr_wy, gdn.cpr_wy_prefill, gdn.cpr_wy_decode = triton_core.train, triton_core.prefill, triton_decode.decode
"""

CORE = """
lengths = [19, 0, 16, 1]
x = inputs(lengths)
plan = gdn.Plan(lengths, 16)
base = gdn.cpr_wy(*x, plan, out_dtype=F32)
assert relative(base, reference(*x, plan, out_dtype=F32)) < 1e-5
whole = Engine(x, lengths, dirty_pool(5), [4, 1, 0, 2])
whole.prefill(dict(enumerate(lengths)))
assert_bit_equal(whole.o, base, "prefill")
for two in (0, 1):
    launch.TABLE["decode"]["16"] = {"BV": 32, "num_warps": 2, "two_launches": two}
    split = Engine(x, lengths, dirty_pool(5), [3, 1, 2, 0])
    split.prefill({0: 14, 2: 15})
    split.finish()
    assert_bit_equal(split.o, base, "split")
    for n in range(4):
        assert_same_state(split.state(n), whole.state(n), str(n))
damaged = Engine(x, lengths, dirty_pool(5), [3, 1, 2, 0])
damaged.prefill({0: 17})
damaged.pool.rhs[3, 0, 0] = nudge(damaged.pool.rhs[3, 0, 0], 5)
damaged.finish()
assert not bit_equal(damaged.o, base)
"""

EMPTY = """
nothing, none = [t[:0] for t in inputs([1])], torch.zeros(0, dtype=torch.int32)
for lengths in ([], [0]):
    leaves = [t.clone().requires_grad_() for t in nothing]
    out = gdn.cpr_wy(*leaves, gdn.Plan(lengths, 16))
    assert out.shape == (0, 2, 32)
    assert [g.shape for g in torch.autograd.grad(out, leaves, nothing[2])] == [t.shape for t in nothing]
    slots = torch.zeros(len(lengths), dtype=torch.int32)
    assert gdn.cpr_wy_prefill(*nothing, gdn.Plan(lengths, 16, [5] * len(lengths)), dirty_pool(1), slots).shape == (0, 2, 32)
assert gdn.cpr_wy_decode(*nothing, dirty_pool(1), none, none).shape == (0, 2, 32)
"""

GRADIENT = """
from tests.gdn.gradient_cases import recurrence_gradients
lengths = [0, 70]
x = inputs(lengths)
weight = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
leaves = [t.clone().requires_grad_() for t in x]
grads = torch.autograd.grad(gdn.cpr_wy(*leaves, gdn.Plan(lengths, 16)), leaves, weight)
for ours, exact in zip(grads, recurrence_gradients(x, lengths, weight)):
    assert relative(ours, exact) < 1e-2
"""

EDGES = """
H, HV, K, V, lengths = 2, 4, 32, 16, [4, 0, 1, 13]
T, D = sum(lengths), 2 * H * K + HV * V
torch.manual_seed(0)
x, a, b, weight = (torch.randn(*s).bfloat16() for s in ((T, D + 8), (T, HV), (T, HV), (D, 4)))
x, a = x[:, :D], a * 5
A_log, dt_bias, window = torch.rand(HV), torch.rand(HV), torch.randn(4, 3, D).bfloat16()
plan = gdn.Plan(lengths, 16, [0, 3, 4, 0])
fused = triton_edges.mixer_inputs(x, a, b, weight, A_log, dt_bias, plan, H, HV, K, V, window)
on_cpu = reference_conv.mixer_inputs(x, a, b, weight, A_log, dt_bias, plan, H, HV, K, V, window)
for ours, reference in zip(fused, on_cpu):
    assert torch.allclose(ours.float(), reference.float(), rtol=1e-5, atol=1e-6)
y, tail = triton_edges.conv1d(x, weight, plan, window)
assert_bit_equal(triton_edges.l2norm(y[:, : H * K].unflatten(-1, (H, K))), fused[0], "q")
assert_bit_equal(triton_edges.gating(a, b, A_log, dt_bias)[0], fused[3], "g")
assert_bit_equal(tail, fused[5], "window")
launch.TABLE["conv"]["any"] = {**launch.TABLE["conv"]["any"], "rows": 4, "ahead": 2}
assert_bit_equal(triton_edges.conv1d(x, weight, plan, window)[0], y, "tiles inside one sequence")
pool, at = torch.zeros(3, 3, D).bfloat16(), torch.tensor([2], dtype=torch.int32)
for t in range(4):
    step = triton_edges.mixer_step_inputs(x[t : t + 1], a[t : t + 1], b[t : t + 1], weight, A_log, dt_bias, pool, at, H, HV, K, V)
    for one, other in zip(step, fused):
        assert_bit_equal(one, other[t : t + 1], f"step {t}")
assert_bit_equal(pool[2], fused[5][0], "window after steps")
"""


EDGES_GRADIENT = """
from isoexec.ops.gdn import smooth_edges as smooth
H, HV, K, V, lengths = 2, 4, 32, 32, [4, 0, 1, 33]
T, D = sum(lengths), 2 * H * K + HV * V
torch.manual_seed(0)
values = [*(torch.randn(*s).bfloat16() for s in ((T, D + 8), (T, HV), (T, HV), (D, 4))), torch.rand(HV), torch.rand(HV)]
values[0] = values[0][:, :D]
plan = gdn.Plan(lengths, 16)
leaves = [t.clone().requires_grad_() for t in values]
outs = triton_edges.mixer_inputs(*leaves, plan, H, HV, K, V)[:5]
weights = [torch.randn(o.shape).to(o.dtype) for o in outs]
grads = torch.autograd.grad(outs, leaves, weights)
exact = [t.double().requires_grad_() for t in values]
wanted = torch.autograd.grad(smooth.mixer_inputs(*exact, plan, H, HV, K, V, 1e-6), exact, [w.double() for w in weights])
names = "x a b weight A_log dt_bias".split()
for name, one, other in zip(names, grads, wanted):
    assert relative(one, other) < 8e-3, (name, relative(one, other))
x, a, b, weight, A_log, dt_bias = leaves
y = triton_edges.conv1d(x, weight, plan)[0]
q, k, v = (t.unflatten(-1, (-1, 32)) for t in y.split((H * K, H * K, HV * V), -1))
apart = triton_edges.l2norm(q), triton_edges.l2norm(k), v, *triton_edges.gating(a, b, A_log, dt_bias)
for name, one, other in zip(names, torch.autograd.grad(apart, leaves, weights), wanted):
    assert relative(one, other) < 8e-3, ("apart", name, relative(one, other))
"""

STEP = """
H, HV, K, V, lengths = 1, 2, 32, 32, [18, 3]
B, D = 2, 2 * H * K + HV * V
torch.manual_seed(0)
weight, A_log, dt_bias, norm_weight = torch.randn(D, 4).bfloat16(), torch.rand(HV), torch.rand(HV), torch.rand(V).bfloat16()
pools, windows = [dirty_pool(3) for _ in range(3)], [torch.zeros(3, 3, D).bfloat16() for _ in range(3)]
slots, dims = torch.tensor([2, 1], dtype=torch.int32), (H, HV, K, V)
from isoexec.ops.norm.triton import gated_rms_norm
for t in range(18):
    x, a, b, z = (torch.randn(B, n).bfloat16() for n in (D, HV, HV, HV * V))
    z, positions = z.unflatten(-1, (HV, V)), torch.tensor([t, t], dtype=torch.int32)
    y = triton_edges.conv1d_step(x, weight, windows[0], slots)
    q, k, v = (s.unflatten(-1, (-1, 32)) for s in y.split((H * K, H * K, HV * V), -1))
    gates = triton_edges.gating(a, b, A_log, dt_bias)
    apart = triton_decode.decode(triton_edges.l2norm(q), triton_edges.l2norm(k), v, *gates, pools[0], slots, positions)
    for two in (0, 1):
        launch.TABLE["decode"]["16"] = {"BV": 32, "num_warps": 2, "two_launches": two}
        saved = [f.clone() for f in pools[1].tensors()]
        one = triton_decode.step(y, a, b, A_log, dt_bias, pools[1], slots, positions, *dims)
        assert_bit_equal(one, apart, f"step {t} in {two + 1} launches")
        if not two:
            [f.copy_(s) for f, s in zip(pools[1].tensors(), saved)]
    whole = triton_decode.mixer_step(x, a, b, z, weight, A_log, dt_bias, norm_weight, windows[2], pools[2], slots, positions, *dims)
    assert_bit_equal(whole, gated_rms_norm(apart, z, norm_weight, 1e-6), f"mixer step {t}")
for other in (1, 2):
    for n in (1, 2):
        assert_same_state(pools[other].live(n, 18), pools[0].live(n, 18), f"pool {other}")
assert_bit_equal(windows[2], windows[0], "windows")
"""

CPR = """
from isoexec.ops.gdn import reference_cpr
lengths = [19, 0, 16, 1]
x = inputs(lengths)
plan = gdn.Plan(lengths, 16)
base = triton_cpr.train(*x, plan, out_dtype=F32)
assert relative(base, reference_cpr.train(*x, plan, out_dtype=F32)) < 1e-5
gdn.cpr_prefill, gdn.cpr_decode = triton_cpr.prefill, triton_cpr.decode
whole = Engine(x, lengths, dirty_pool(5, kind=gdn.RecurrentPool), [4, 1, 0, 2], "cpr")
whole.prefill(dict(enumerate(lengths)))
assert_bit_equal(whole.o, base, "prefill")
split = Engine(x, lengths, dirty_pool(5, kind=gdn.RecurrentPool), [3, 1, 2, 0], "cpr")
split.prefill({0: 14, 2: 7})
split.prefill({0: 1, 2: 8})
split.finish()
assert_bit_equal(split.o, base, "split")
for n in range(4):
    assert_same_state(split.state(n), whole.state(n), str(n))
damaged = Engine(x, lengths, dirty_pool(5, kind=gdn.RecurrentPool), [3, 1, 2, 0], "cpr")
damaged.prefill({2: 14})
damaged.pool.now[2].view(torch.int32).add_(1)  # one ulp of every element: a decay may hide a single one
damaged.finish()
assert not bit_equal(damaged.o, base)
"""

BODIES = {"core, step": CORE + STEP, "gradient, edges": GRADIENT + EDGES + EDGES_GRADIENT, "cpr, empty": CPR + EMPTY}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_kernels_under_the_interpreter(body):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(body)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-2000:]
