"""Gates of the ops around the core, and of those that fuse them with a decode step."""

from __future__ import annotations

import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.gdn import smooth_edges
from isoexec.ops.norm import gated_rms_norm
from tests.gdn.cases import assert_same_state, relative
from tests.gdn.gate_tools import HEADS, captured, entries, ints, launched, no_host_sync, poisoned, pool

H, HV, K, V = HEADS
D = 2 * H * K + HV * V
NAMES = "x a b weight A_log dt_bias".split()
#: Kernel -> other settings of it.
FORWARD_TILES = {
    "conv": [dict(rows=8, channels=128, ahead=2, num_warps=2), dict(rows=16, channels=512, ahead=8, num_warps=4)],
    "inputs": [dict(rows=8, num_warps=2), dict(rows=32, num_warps=8)],
    "gating": [dict(rows=64, num_warps=1), dict(rows=256, num_warps=8)],
    "l2norm": [dict(rows=4, num_warps=1), dict(rows=32, num_warps=8)],
}
BACKWARD_TILES = {
    "channels_back": [dict(rows=8, steps=16, channels=64, num_warps=4), dict(rows=16, steps=4, channels=128, num_warps=8)],
    "taps_back": [dict(rows=8, channels=128, num_warps=2), dict(rows=32, channels=64, num_warps=8)],
    "gating_back": [dict(rows=64, num_warps=1), dict(rows=256, num_warps=8)],
    "l2norm_back": [dict(rows=4, num_warps=1), dict(rows=32, num_warps=8)],
}
STEP_TILES = {
    "decode_gated": [dict(BV=128, num_warps=2), dict(BV=128, num_warps=4)],
    "decode_pre": [dict(num_warps=2), dict(num_warps=4)],
}


def _draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).bfloat16().cuda()


def _values(T, seed=0):
    """x (rows of a wider tensor), a, b, weight, A_log, dt_bias."""
    normal = _draw(seed)
    small = [torch.rand(HV, generator=torch.Generator().manual_seed(seed + n)).cuda() for n in (1, 2)]
    return [normal(T, D + 64)[:, :D], normal(T, HV) * 3, normal(T, HV) * 3, normal(D, 4), *small]


def _apart(x, a, b, weight, A_log, dt_bias, plan):
    """The ops that `mixer_inputs` fuses, one by one."""
    y, window = gdn.conv1d(x, weight, plan)
    q, k, v = y.split((H * K, H * K, HV * V), -1)
    q, k = (gdn.l2norm(t.unflatten(-1, (H, K))) for t in (q, k))
    return q, k, v.unflatten(-1, (HV, V)), *gdn.gating(a, b, A_log, dt_bias), window


def edges(chunk):
    """Convolution, l2norm and gating: fused equals apart, single steps equal the sequence, any split, dirty windows, other tiles."""
    lengths = [45, 0, 1, 200]
    values, plan = _values(sum(lengths)), gdn.Plan(lengths, chunk, device="cuda")
    x, a, b, weight, A_log, dt_bias = values
    fused = gdn.mixer_inputs(*values, plan, *HEADS)
    same = lambda found, what: [assert_bit_equal(one, other, f"{what} {n}") for n, one, other in zip("qkvgbw", found, fused, strict=True)]
    same([t.contiguous() for t in _apart(*values, plan)], "apart")
    with poisoned():
        same(gdn.mixer_inputs(*values, plan, *HEADS), "poisoned")
        same([t.contiguous() for t in _apart(*values, plan)], "poisoned, apart")
    for kernel, settings in FORWARD_TILES.items():
        for setting in settings:
            with entries(kernel, None, **setting):
                same(gdn.mixer_inputs(*values, plan, *HEADS), f"{kernel} {setting}")
                same([t.contiguous() for t in _apart(*values, plan)], f"{kernel} {setting}, apart")
    on_cpu = gdn.mixer_inputs(*(t.cpu() for t in values), gdn.Plan(lengths, chunk), *HEADS)
    worst = max(relative(one.cpu(), other) for one, other in zip(fused, on_cpu))
    assert worst < 1e-4, worst
    pages = torch.full((3, 4, D), float("nan"), dtype=torch.bfloat16, device="cuda")[:, :3]
    at, cut = ints(1), slice(46, 246)
    for start in (0, 1, 3, 50):
        head = gdn.mixer_inputs(x[cut][:start], a[cut][:start], b[cut][:start], weight, A_log, dt_bias,
                                gdn.Plan([start], chunk, device="cuda"), *HEADS, window=pages[:1].contiguous())  # fmt: skip
        pages[1] = head[-1][0] if start else 0.0
        for t in range(start, start + 6):
            row = slice(46 + t, 47 + t)
            one = gdn.mixer_step_inputs(x[row], a[row], b[row], weight, A_log, dt_bias, pages, at, *HEADS)
            for name, got, other in zip("qkvgb", one, fused):
                assert_bit_equal(got, other[row], f"step {t} after {start}, {name}")
        rest = gdn.mixer_inputs(x[cut][start + 6 :], a[cut][start + 6 :], b[cut][start + 6 :], weight, A_log, dt_bias,
                                gdn.Plan([200 - start - 6], chunk, [start + 6], device="cuda"), *HEADS, window=pages[1:2])  # fmt: skip
        assert_bit_equal(rest[2], fused[2][46 + start + 6 : 246], "rest")
    moved = gdn.mixer_inputs(x, a, b, weight, A_log, nudge(dt_bias, 0, 8), plan, *HEADS)
    assert not bit_equal(moved[3], fused[3]), "a change of dt_bias was not seen"
    return {"against_cpu_reference": worst}


def edges_gradient(chunk):
    """Gradients around the core: two runs equal; error against fp64 autograd; fused and apart; other tiles; controls."""
    lengths = [45, 0, 1, 200]
    values, plan = _values(sum(lengths)), gdn.Plan(lengths, chunk, device="cuda")
    forms = {"fused": lambda *t: gdn.mixer_inputs(*t, plan, *HEADS)[:5], "apart": lambda *t: _apart(*t, plan)[:5]}
    normal = _draw(9)
    weights = [normal(*o.shape).to(o.dtype) for o in forms["fused"](*values)]
    exact = [t.double().requires_grad_() for t in values]
    wanted = torch.autograd.grad(smooth_edges.mixer_inputs(*exact, plan, *HEADS, 1e-6), exact, [w.double() for w in weights])

    def gradients(form, inputs=values, outputs=weights):
        leaves = [t.clone().requires_grad_() for t in inputs]
        return torch.autograd.grad(forms[form](*leaves), leaves, outputs)

    def checked(form, what):
        first, second = gradients(form), gradients(form)
        for name, one, two, other in zip(NAMES, first, second, wanted):
            assert_bit_equal(one, two, f"{what}: gradient of {name}, second run")
            assert relative(one, other) < 8e-3, (what, name, relative(one, other))
        return first

    errors = {}
    for form in forms:
        found = checked(form, form)
        errors |= {f"{form} {name}": relative(one, other) for name, one, other in zip(NAMES, found, wanted)}
        with poisoned():
            assert all(bit_equal(a, b) for a, b in zip(gradients(form), found)), "poisoned memory was seen"
        for at, (name, t) in enumerate(zip(NAMES, values)):
            where = t.numel() // 2 if t.dtype == torch.bfloat16 else slice(None)
            moved = [*values[:at], nudge(t, where), *values[at + 1 :]]
            assert not all(bit_equal(a, b) for a, b in zip(gradients(form, moved), found)), f"{form}: one ulp of {name} was not seen"
        moved = [nudge(weights[0], 7), *weights[1:]]
        assert not all(bit_equal(a, b) for a, b in zip(gradients(form, values, moved), found)), "one ulp of q's gradient was not seen"
    for kernel, settings in BACKWARD_TILES.items():
        for setting in settings:
            with entries(kernel, None, **setting):
                for form in forms:
                    checked(form, f"{form}, {kernel} {setting}")
    nothing = [t[:0] for t in values[:3]] + values[3:]
    leaves = [t.clone().requires_grad_() for t in nothing]
    outs = gdn.mixer_inputs(*leaves, gdn.Plan([0], chunk, device="cuda"), *HEADS)[:5]
    found = torch.autograd.grad(outs, leaves, [torch.zeros_like(o) for o in outs])
    assert [g.shape for g in found] == [t.shape for t in nothing] and not any(g.count_nonzero() for g in found)
    return {"relative_error": errors}


class _Steps:
    """A decode run of the mixer: three lanes, one of them inert."""

    B, live, slots = 3, [0, 2], (2, -1, 1)

    def __init__(self, chunk):
        self.chunk, self.tokens, self.normal = chunk, 2 * chunk + 3, _draw()
        _, _, _, self.weight, self.A_log, self.dt_bias = _values(1)
        self.norm_weight, self.at = self.normal(V), ints(*self.slots)

    def window(self):
        return torch.zeros(3, 3, D, dtype=torch.bfloat16, device="cuda")

    def pool(self):
        return pool("cpr_wy", 3, self.chunk)

    def inputs(self):
        return self.normal(self.B, D + 64)[:, :D], self.normal(self.B, HV) * 3, self.normal(self.B, HV) * 3, self.normal(self.B, HV, V)

    def apart(self, x, a, b, z, window, p, positions):
        """-> convolved channels, o, and o after the gated norm, by the ops one after another."""
        y = gdn.conv1d_step(x, self.weight, window, self.at)
        q, k, v = (s.unflatten(-1, (-1, d)) for s, d in zip(y.split((H * K, H * K, HV * V), -1), (K, K, V)))
        gates = gdn.gating(a, b, self.A_log, self.dt_bias)
        o = gdn.cpr_wy_decode(gdn.l2norm(q), gdn.l2norm(k), v, *gates, p, self.at, positions)
        return y, o, gated_rms_norm(o, z, self.norm_weight, 1e-6)

    def step(self, y, a, b, p, positions):
        return gdn.cpr_wy_step(y, a, b, self.A_log, self.dt_bias, p, self.at, positions, *HEADS)

    def mixer(self, x, a, b, z, window, p, positions):
        return gdn.mixer_step(x, a, b, z, self.weight, self.A_log, self.dt_bias, self.norm_weight, window, p, self.at, positions, *HEADS)


def step(chunk):
    """A decode step with gating and l2norm inside, and with all of the mixer, against its ops apart: outputs, states, windows."""
    run = _Steps(chunk)
    settings = [{}] + [{kernel: setting} for kernel, listed in STEP_TILES.items() for setting in listed]
    pools, windows = [run.pool() for _ in range(3 + len(settings))], [run.window() for _ in range(1 + len(settings))]
    for t in range(run.tokens):
        x, a, b, z = run.inputs()
        positions = ints(t, t, t)
        y, o, normed = run.apart(x, a, b, z, windows[0], pools[0], positions)
        for two in (0, 1):
            with entries("decode", chunk, BV=32, num_warps=2, two_launches=two):
                assert_bit_equal(run.step(y, a, b, pools[1 + two], positions), o, f"step {t}, {two + 1} launches")
        for p, window, setting in zip(pools[3:], windows[1:], settings):
            kernel, values = next(iter(setting.items()), (None, {}))
            with entries(kernel, chunk, **values) if kernel else poisoned():
                found = run.mixer(x, a, b, z, window, p, positions)
            assert_bit_equal(found[run.live], normed[run.live], f"mixer step {t}, {setting}")
            assert_bit_equal(found[1], torch.zeros_like(found[1]), "inert lane")
    for n in (1, 2):
        for other in pools[1:]:
            assert_same_state(other.live(n, run.tokens), pools[0].live(n, run.tokens), f"slot {n}")
    for window in windows[1:]:
        assert_bit_equal(window, windows[0], "windows")
    again, moved = (run.mixer(x, a, b, g, windows[n], pools[3], positions - 1) for n, g in ((1, z), (2, nudge(z, 0))))
    assert not bit_equal(moved, again), "one ulp of the gate was not seen"
    before = [t.clone() for t in pools[0].tensors()]
    run.at = ints()
    nothing = [t[:0] for t in (x, a, b, z)]
    assert run.mixer(*nothing, windows[0], pools[0], ints()).shape == (0, HV, V)
    assert run.step(y[:0], a[:0], b[:0], pools[0], ints()).shape == (0, HV, V)
    for old, new in zip(before, pools[0].tensors()):
        assert_bit_equal(new, old, "no lanes")


def step_graphs(chunk):
    """The fused steps captured once and replayed; launches of each; no wait for the GPU."""
    run, counts = _Steps(chunk), {}
    x, a, b, z = static = run.inputs()
    y, positions = run.window()[:, 0, :].clone(), ints(0, 0, 0)
    reference, window = run.pool(), run.window()
    captures = []
    for two in (0, 1):
        with entries("decode", chunk, BV=64, num_warps=4, two_launches=two):
            p = run.pool()
            fn = lambda p=p: run.step(y, a, b, p, positions)
            counts[f"cpr_wy_step, {two + 1}"] = len(launched(fn))
            with no_host_sync():
                fn()
            captures.append((*captured(fn), p))
    p, w = run.pool(), run.window()
    fn = lambda: run.mixer(x, a, b, z, w, p, positions)
    counts["mixer_step"] = len(launched(fn))
    with no_host_sync():
        fn()
    mixer, mixed = captured(fn)
    w.zero_()
    assert counts == {"cpr_wy_step, 1": 1, "cpr_wy_step, 2": 2, "mixer_step": 2}, counts
    counts["the ops of a mixer step apart"] = len(launched(lambda: run.apart(*static, window, reference, positions)))
    window.zero_()
    for t in range(run.tokens):
        for buffer, new in zip(static, run.inputs()):
            buffer.copy_(new)
        positions.fill_(t)
        now, o, normed = run.apart(x, a, b, z, window, reference, positions)
        y.copy_(now)
        for n, (graph, out, _) in enumerate(captures):
            graph.replay()
            assert_bit_equal(out, o, f"replay of the step, token {t}, {n + 1} launches")
        mixer.replay()
        assert_bit_equal(mixed[run.live], normed[run.live], f"replay of the mixer step, token {t}")
    for n in (1, 2):
        for other in (p, *(c[2] for c in captures)):
            assert_same_state(other.live(n, run.tokens), reference.live(n, run.tokens), f"slot {n}")
    assert_bit_equal(w, window, "windows")
    return {"launches_of_a_step": counts}
