"""A whole decode step as one op, against the same ops apart, on the CPU."""

import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import bit_equal, nudge
from isoexec.ops.norm import gated_rms_norm
from tests.gdn.cases import assert_same_state, dirty_pool
from tests.ops.op_checks import same_bits

HEADS = H, HV, K, V = 1, 2, 32, 32
D = 2 * H * K + HV * V
TOKENS = 18


def steps(change=lambda t, z: z):
    """-> per token (core apart, core as a step, mixer apart, mixer as a step) on the live lanes, and the pools and windows after."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *s: torch.randn(*s, generator=generator).bfloat16()
    weight, norm_weight, A_log, dt_bias = normal(D, 4), normal(V), torch.rand(HV), torch.rand(HV)
    slots = torch.tensor([2, -1, 1], dtype=torch.int32)
    pools, windows = [dirty_pool(3) for _ in range(3)], [torch.zeros(3, 3, D).bfloat16() for _ in range(2)]
    seen = []
    for t in range(TOKENS):
        x, a, b, z = normal(3, D), normal(3, HV), normal(3, HV), normal(3, HV, V)
        positions = torch.full((3,), t, dtype=torch.int32)
        y = gdn.conv1d_step(x, weight, windows[0], slots)
        q, k, v = (s.unflatten(-1, (-1, 32)) for s in y.split((H * K, H * K, HV * V), -1))
        apart = gdn.cpr_wy_decode(gdn.l2norm(q), gdn.l2norm(k), v, *gdn.gating(a, b, A_log, dt_bias), pools[0], slots, positions)
        step = gdn.cpr_wy_step(y, a, b, A_log, dt_bias, pools[1], slots, positions, *HEADS)
        mixed = gdn.mixer_step(x, a, b, change(t, z), weight, A_log, dt_bias, norm_weight, windows[1], pools[2], slots, positions, *HEADS)
        same_bits(mixed[1], torch.zeros_like(mixed[1]), "inert lane")
        live = [0, 2]
        seen.append((apart[live], step[live], gated_rms_norm(apart, z, norm_weight, 1e-6)[live], mixed[live]))
    return seen, pools, windows


def test_a_step_as_one_op_gives_the_bits_of_its_ops():
    seen, pools, windows = steps()
    for t, (apart, step, mixer_apart, mixed) in enumerate(seen):
        same_bits(step, apart, f"core, token {t}")
        same_bits(mixed, mixer_apart, f"mixer, token {t}")
    for other in pools[1:]:
        for n in (1, 2):
            assert_same_state(other.live(n, TOKENS), pools[0].live(n, TOKENS), f"slot {n}")
    same_bits(windows[1], windows[0], "windows")


def test_one_ulp_of_the_gate_is_seen():
    seen, _, _ = steps(lambda t, z: nudge(z, 0) if t == 5 else z)
    assert not bit_equal(seen[5][3], seen[5][2])
    assert bit_equal(seen[6][3], seen[6][2])
