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
from isoexec.ops.gdn import launch, triton_core, triton_edges, reference_conv
from tests.gdn.cases import F32, Engine, assert_same_state, dirty_pool, inputs, relative
reference = gdn.cpr_wy
# One BV everywhere: the interpreter multiplies with the host's library, whose bits depend on the tile's shape.
for kernel in ("chain", "chain_narrow", "decode", "decode_main"):
    launch.TABLE[kernel]["16"] = {**launch.TABLE[kernel]["16"], "BV": 32}
gdn.cpr_wy, gdn.cpr_wy_prefill, gdn.cpr_wy_decode = triton_core.train, triton_core.prefill, triton_core.decode
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

GRADIENT = """
from tests.gdn.test_gradient_cpu import recurrence_grad
lengths = [0, 70]
x = inputs(lengths)
weight = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
leaves = [t.clone().requires_grad_() for t in x]
grads = torch.autograd.grad(gdn.cpr_wy(*leaves, gdn.Plan(lengths, 16)), leaves, weight)
for ours, exact in zip(grads, recurrence_grad(x, lengths, weight)):
    assert relative(ours, exact) < 1e-2
"""

EDGES = """
H, HV, K, V, lengths = 2, 4, 32, 16, [4, 0, 1, 13]
T, D = sum(lengths), 2 * H * K + HV * V
torch.manual_seed(0)
x, a, b, weight = torch.randn(T, D + 8)[:, :D].bfloat16(), torch.randn(T, HV).bfloat16() * 5, torch.randn(T, HV).bfloat16(), torch.randn(D, 4).bfloat16()
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
pool, at = torch.zeros(3, 3, D).bfloat16(), torch.tensor([2], dtype=torch.int32)
for t in range(4):
    step = triton_edges.mixer_step_inputs(x[t : t + 1], a[t : t + 1], b[t : t + 1], weight, A_log, dt_bias, pool, at, H, HV, K, V)
    for one, other in zip(step, fused):
        assert_bit_equal(one, other[t : t + 1], f"step {t}")
assert_bit_equal(pool[2], fused[5][0], "window after steps")
"""


@pytest.mark.parametrize("body", [CORE, GRADIENT, EDGES], ids=["core", "gradient", "edges"])
def test_kernels_under_the_interpreter(body):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", PROLOGUE + textwrap.dedent(body)], env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
