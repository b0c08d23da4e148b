"""Gates of the GPU backend: bit parity over fp32 before the rounding and over state. Run as a program on a machine with a GPU
(``python -m tests.gdn.gates [results.json [16 32] [gate ...]]``) or through test_gpu.py.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time

import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.gdn import launch, smooth_edges
from isoexec.ops.norm import gated_rms_norm
from tests.gdn.cases import (F32, Engine, assert_same_state, dirty_pool, inputs, one_shot, recurrence, relative,
                             select)  # fmt: skip

SHAPE = dict(H=4, HV=8, K=128, V=128)
LENGTHS = [130, 1, 257, 0, 64, 15, 384]
CHAIN_TILES = [(16, 1), (32, 2), (32, 4), (64, 4), (64, 2), (128, 8)]
DECODE_TILES = [(1, 32, 2), (1, 64, 4), (1, 128, 8), (2, 32, 1), (2, 32, 2), (2, 64, 4), (2, 128, 4), (2, 128, 8)]


def make(lengths, device="cuda", **kw):
    return inputs(lengths, **{**SHAPE, **kw}, device=device)


def pool(slots, chunk, **kw):
    return dirty_pool(slots, **{**SHAPE, **kw}, chunk=chunk, device="cuda")


def whole(x, lengths, chunk):
    engine = Engine(x, lengths, pool(len(lengths) + 2, chunk), list(range(len(lengths))))
    engine.prefill(dict(enumerate(lengths)))
    return engine


@contextlib.contextmanager
def entries(kernel, chunk, **values):
    """Another launch configuration for the duration of a gate."""
    table = launch.TABLE[kernel]
    saved, table[str(chunk)] = table[str(chunk)], values
    try:
        yield
    finally:
        table[str(chunk)] = saved


def case_parity(chunk):
    """Trainer, prefill in one piece, random splits with ragged decode: outputs and states."""
    x = make(LENGTHS)
    base, full = one_shot(x, LENGTHS, chunk), whole(x, LENGTHS, chunk)
    assert_bit_equal(full.o, base, "prefill against trainer")
    for seed in range(3):
        slots = random.Random(seed).sample(range(9), len(LENGTHS))
        split = Engine(x, LENGTHS, pool(9, chunk), slots).random_run(seed, share=(0.9, 0.3, 0.6)[seed])
        assert_bit_equal(split.o, base, f"split {seed}")
        for n in range(len(LENGTHS)):
            assert_same_state(split.state(n), full.state(n), f"split {seed}, sequence {n}")


def single_steps(chunk):
    """From an empty slot, token by token."""
    for length in (1, 15, 16, 17, 31, 33, 65, 129):
        x = make([length], seed=length)
        steps = Engine(x, [length], pool(1, chunk), [0]).finish()
        assert_bit_equal(steps.o, one_shot(x, [length], chunk), f"{length} steps")
        assert_same_state(steps.state(0), whole(x, [length], chunk).state(0), f"{length} steps")


def packing(chunk):
    """Each sequence alone; some heads alone (a tensor-parallel rank)."""
    x = make(LENGTHS)
    base, first = one_shot(x, LENGTHS, chunk), 0
    for length in LENGTHS:
        if length:
            alone = one_shot(select(x, range(first, first + length)), [length], chunk)
            assert_bit_equal(alone, base[first : first + length], f"sequence of {length}")
        first += length
    rank = [t[:, 1:2].contiguous() for t in x[:2]] + [t[:, 2:4].contiguous() for t in x[2:]]
    assert_bit_equal(one_shot(rank, LENGTHS, chunk), base[:, 2:4].contiguous(), "heads 2 and 3")


def tiles(chunk):
    """No tile, warp or launch count changes a bit."""
    x = make(LENGTHS)
    base = one_shot(x, LENGTHS, chunk)
    for BV, warps in CHAIN_TILES:
        for stages, unroll in ((1, 1), (2, 4), (3, 2)) if chunk < 32 and BV * warps <= 64 else ((2, 1),):
            setting = dict(BV=BV, num_warps=warps, stages=stages, unroll=unroll)
            with entries("chain", chunk, **setting), entries("chain_narrow", chunk, **setting):
                assert_bit_equal(one_shot(x, LENGTHS, chunk), base, f"chain BV {BV}, {warps} warps, {stages} stages, unroll {unroll}")
    for warps in (1, 2, 4):
        with entries("prepass", chunk, num_warps=warps):
            assert_bit_equal(one_shot(x, LENGTHS, chunk), base, f"pre-pass of {warps} warps")
    lengths = [chunk * 2 + 5, 3, chunk + 1]
    x = make(lengths)
    base = one_shot(x, lengths, chunk)
    for launches, BV, warps in DECODE_TILES:
        extra = {"two_launches": 1} if launches == 2 else {}
        with entries("decode", chunk, BV=BV, num_warps=warps, **extra), entries("decode_main", chunk, BV=BV, num_warps=warps, **extra):
            engine = Engine(x, lengths, pool(3, chunk), [2, 0, 1]).finish()
            assert_bit_equal(engine.o, base, f"decode in {launches} launches, BV {BV}, {warps} warps")


def many_sequences(chunk):
    """1 to 512 ragged sequences: decode and prefill do not depend on the batch."""
    lengths = [1 + (37 * n) % 70 for n in range(512)]
    x = make(lengths, H=1, HV=2)
    base = one_shot(x, lengths, chunk)
    for count in (1, 2, 3, 8, 17, 64, 257, 512):
        rows = range(sum(lengths[:count]))
        engine = Engine(select(x, rows), lengths[:count], pool(count, chunk, H=1, HV=2), list(range(count)))
        engine.prefill({n: lengths[n] // 2 for n in range(count)})
        engine.finish()
        assert_bit_equal(engine.o, base[: len(rows)].contiguous(), f"{count} sequences")


def hostile_values(chunk):
    """Huge finite later rows, subnormals, extreme gates."""
    x = make([80])
    base = one_shot(x, [80], chunk)
    for last in (chunk, chunk + 5, 50):
        huge = [t.clone() for t in x]
        huge[2][last:] = 1e30
        assert_bit_equal(one_shot(huge, [80], chunk)[:last], base[:last], f"huge rows from {last}")
    x[3][5::7] = -200.0
    x[3][3::11] = 0.0
    x[4][2::5] = 0.0
    x[4][4::9] = 1.0
    x[2][10:20] = 1e-39
    x[4][12:18] = 1e-38
    base = one_shot(x, [80], chunk)
    assert bool(torch.isfinite(base).all())
    assert_bit_equal(Engine(x, [80], pool(1, chunk), [0]).finish().o, base, "subnormals and extreme gates")
    x[2][44] = float("nan")
    assert not bool(torch.isfinite(one_shot(x, [80], chunk)[44]).any()), "a non-finite row must not look finite"


def inert_lanes(chunk):
    x = make([3])
    p = pool(3, chunk)
    before = [t.clone() for t in p.tensors()]
    at = lambda *v: torch.tensor(v, dtype=torch.int32, device="cuda")
    for two in (0, 1):
        with entries("decode", chunk, BV=32, num_warps=2, two_launches=two):
            o = gdn.cpr_wy_decode(*x, p, at(-1, 2, 0), at(5, 0, 9), null_slot=0, out_dtype=F32)
        assert_bit_equal(o[[0, 2]], torch.zeros_like(o[[0, 2]]), "inert output")
        for old, new in zip(before, p.tensors()):
            assert_bit_equal(old[:2], new[:2], "other slots")


def paged_views(chunk):
    """A pool made of views into pages larger than a slot."""
    x, base_pool = make([70]), pool(4, chunk)
    paged = gdn.StatePool(*(torch.cat([t, t.clone()], 1)[:, : t.shape[1]] for t in base_pool.tensors()))
    assert paged.high.stride(0) == 2 * base_pool.high.stride(0)
    engine = Engine(x, [70], paged, [3])
    engine.prefill({0: 33})
    assert_bit_equal(engine.finish().o, one_shot(x, [70], chunk), "paged")


def graph_replay(chunk):
    """Decode captured once and replayed: positions and slots are read on the device."""
    length = 2 * chunk + 3
    x = make([length] * 3)
    base = one_shot(x, [length] * 3, chunk)
    rows = [torch.arange(3, device="cuda") * length + t for t in range(length)]
    for two in (0, 1):
        p, static = pool(4, chunk), [t[:3].clone() for t in x]
        slots = torch.tensor([3, 0, 2], dtype=torch.int32, device="cuda")
        positions = torch.zeros(3, dtype=torch.int32, device="cuda")
        with entries("decode", chunk, BV=64, num_warps=4, two_launches=two):
            gdn.cpr_wy_decode(*static, p, slots, positions, out_dtype=F32)  # compile outside the capture
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                o = gdn.cpr_wy_decode(*static, p, slots, positions, out_dtype=F32)
        for t in range(length):
            for buffer, source in zip(static, x):
                buffer.copy_(source[rows[t]])
            positions.fill_(t)
            graph.replay()
            assert_bit_equal(o, base[rows[t]], f"replay, token {t}")


def accuracy(chunk):
    lengths = [1000, 64, 333]
    x = make(lengths)
    exact, _ = recurrence(*x, lengths)
    ours = relative(one_shot(x, lengths, chunk).bfloat16(), exact)
    assert ours < 4.5e-3, ours
    on_cpu = gdn.cpr_wy(*(t.cpu() for t in x), gdn.Plan(lengths, chunk), out_dtype=F32)
    against = relative(one_shot(x, lengths, chunk).cpu(), on_cpu)
    assert against < 2e-3, against
    same = make([256], seed=5)
    same[1][:] = same[1][:1].clone()
    same[3].zero_()
    same[4].fill_(1.0)
    adversarial = relative(one_shot(same, [256], chunk), recurrence(*same, [256])[0])
    assert adversarial < 2.5e-2, adversarial
    return {"relative_error": ours, "against_cpu_reference": against, "identical_keys": adversarial}


def negative_controls(chunk):
    """One ulp of a stored decay, key or right-hand side must be seen in the output, one of the state in the state."""
    length, cut = chunk * 3, 2 * chunk + chunk // 2

    def run(damage, decay):
        x = make([length])
        x[3] *= decay  # a strong decay forgets a change of S, a weak one hides a change of G: as each should
        engine = Engine(x, [length], pool(1, chunk), [0])
        engine.prefill({0: cut})
        damage(engine.pool)
        return engine.finish(), whole(x, [length], chunk)

    def put(field, index, flat):
        return lambda p: getattr(p, field)[index].copy_(nudge(getattr(p, field)[index], flat))

    def state(p):
        S = gdn.join_planes(p.high[0], p.low[0])
        p.high[0], p.low[0] = gdn.split_planes(nudge(S, int(S.abs().argmax())))

    def decay(p):
        # One ulp in every head: a head that hardly decays hides it in exp, one that decays fast has forgotten the state.
        row = p.gates[0, :, 0]
        for head in range(row.shape[0]):
            row[head] = nudge(row[head], chunk // 2 - 1)

    damages = {"decay": decay, "k": put("k", (0, 1, 3), 7), "rhs": put("rhs", (0, 1, 3), 7)}
    engine, full = run(lambda p: None, 1.0)
    assert bit_equal(engine.o, full.o)
    for name, damage in damages.items():
        engine, full = run(damage, 1.0)
        assert not bit_equal(engine.o, full.o), f"one ulp of {name} was not seen"
    engine, full = run(state, 0.01)
    try:
        assert_same_state(engine.state(0), full.state(0), "damaged")
    except AssertionError:
        return
    raise AssertionError("one ulp of S was not seen")


def recurrence_gradients(x, lengths, weight):
    """fp64 autograd of the token recurrence, all sequences stepping together."""
    x64 = [t.double().requires_grad_() for t in x]
    q, k, v, g, beta = x64
    repeat = v.shape[1] // q.shape[1]
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    outputs, first = [None] * sum(lengths), 0
    for length in lengths:
        S = q.new_zeros(v.shape[1], v.shape[2], q.shape[2])
        for t in range(first, first + length):
            S = S * g[t].exp()[:, None, None]
            u = beta[t][:, None] * (v[t] - (S @ k[t][..., None])[..., 0])
            S = S + u[..., None] * k[t][:, None, :]
            outputs[t] = q.shape[-1] ** -0.5 * (S @ q[t][..., None])[..., 0]
        first += length
    return torch.autograd.grad(torch.stack(outputs), x64, weight.double())


def backward(chunk):
    """Two runs equal; error against fp64; few sequences and many (other tiles of the chain)."""
    errors = {}
    for lengths in ([70, 0, 1, 64, 200], [70, 0, 1, 64, 200] + [33] * 20):
        x = make(lengths, H=2, HV=4)
        weight = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()

        def run():
            leaves = [t.clone().requires_grad_() for t in x]
            return torch.autograd.grad(gdn.cpr_wy(*leaves, gdn.Plan(lengths, chunk, device="cuda")), leaves, weight)

        first, second = run(), run()
        for name, a, b, exact in zip("q k v g beta".split(), first, second, recurrence_gradients(x, lengths, weight)):
            assert_bit_equal(a, b, f"gradient of {name}, second run")
            errors[name] = max(errors.get(name, 0.0), relative(a, exact))
    assert max(errors.values()) < 1e-2, errors
    return {"relative_error": errors}


def step(chunk):
    """A decode step with gating and l2norm inside, and with all of the mixer, against its ops apart: outputs, states, windows."""
    generator, heads = torch.Generator().manual_seed(0), tuple(SHAPE.values())
    H, HV, K, V = heads
    B, D, tokens = 3, 2 * H * K + HV * V, 2 * chunk + 3
    normal = lambda *s: torch.randn(*s, generator=generator).bfloat16().cuda()
    weight, norm_weight = normal(D, 4), normal(V)
    A_log, dt_bias = (torch.rand(HV, generator=generator).cuda() for _ in range(2))
    slots = torch.tensor([2, -1, 1], dtype=torch.int32, device="cuda")
    live = [0, 2]
    pools, windows = [pool(3, chunk) for _ in range(4)], [torch.zeros(3, 3, D, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for t in range(tokens):
        x, a, b, z = normal(B, D + 64)[:, :D], normal(B, HV) * 3, normal(B, HV) * 3, normal(B, HV, V)
        positions = torch.full((B,), t, dtype=torch.int32, device="cuda")
        y = gdn.conv1d_step(x, weight, windows[0], slots)
        q, k, v = (s.unflatten(-1, (-1, d)) for s, d in zip(y.split((H * K, H * K, HV * V), -1), (K, K, V)))
        o = gdn.cpr_wy_decode(gdn.l2norm(q), gdn.l2norm(k), v, *gdn.gating(a, b, A_log, dt_bias), pools[0], slots, positions)
        for two in (0, 1):
            with entries("decode", chunk, BV=32, num_warps=2, two_launches=two):
                raw = gdn.cpr_wy_step(y, a, b, A_log, dt_bias, pools[1 + two], slots, positions, *heads)
            assert_bit_equal(raw, o, f"step {t}, {two + 1} launches")
        all_of_it = gdn.mixer_step(x, a, b, z, weight, A_log, dt_bias, norm_weight, windows[1], pools[3], slots, positions, *heads)
        assert_bit_equal(all_of_it[live], gated_rms_norm(o, z, norm_weight, 1e-6)[live], f"mixer step {t}")
        assert_bit_equal(all_of_it[1], torch.zeros_like(all_of_it[1]), "inert lane")
    for n in (1, 2):
        for other in pools[1:]:
            assert_same_state(other.live(n, tokens), pools[0].live(n, tokens), f"slot {n}")
    assert_bit_equal(windows[1], windows[0], "windows")
    moved = gdn.mixer_step(x, a, b, nudge(z, 0), weight, A_log, dt_bias, norm_weight, windows[1], pools[3], slots, positions - 1, *heads)
    again = gdn.mixer_step(x, a, b, z, weight, A_log, dt_bias, norm_weight, windows[0], pools[0], slots, positions - 1, *heads)
    assert not bit_equal(moved, again), "one ulp of the gate was not seen"


def edges_gradient(chunk):
    """Gradients around the core: two runs equal; error against fp64 autograd; fused and apart."""
    generator, (H, HV, K, V) = torch.Generator().manual_seed(0), SHAPE.values()
    lengths, D = [45, 0, 1, 200], 2 * H * K + HV * V
    T, heads, plan = sum(lengths), (H, HV, K, V), gdn.Plan(lengths, chunk, device="cuda")
    normal = lambda *s: torch.randn(*s, generator=generator).bfloat16().cuda()
    values = [
        normal(T, D + 64)[:, :D],
        normal(T, HV),
        normal(T, HV),
        normal(D, 4),
        *(torch.rand(HV, generator=generator).cuda() for _ in range(2)),
    ]

    def fused(x, a, b, weight, A_log, dt_bias):
        return gdn.mixer_inputs(x, a, b, weight, A_log, dt_bias, plan, *heads)[:5]

    def apart(x, a, b, weight, A_log, dt_bias):
        q, k, v = gdn.conv1d(x, weight, plan)[0].split((H * K, H * K, HV * V), -1)
        q, k = (gdn.l2norm(t.unflatten(-1, (H, K))) for t in (q, k))
        return q, k, v.unflatten(-1, (HV, V)), *gdn.gating(a, b, A_log, dt_bias)

    weights = [torch.randn(o.shape, generator=generator).to(o.dtype).cuda() for o in fused(*values)]
    exact = [t.double().requires_grad_() for t in values]
    wanted = torch.autograd.grad(smooth_edges.mixer_inputs(*exact, plan, *heads, 1e-6), exact, [w.double() for w in weights])
    errors = {}
    for form in (fused, apart):
        runs = []
        for _ in range(2):
            leaves = [t.clone().requires_grad_() for t in values]
            runs.append(torch.autograd.grad(form(*leaves), leaves, weights))
        for name, one, two, other in zip("x a b weight A_log dt_bias".split(), *runs, wanted):
            assert_bit_equal(one, two, f"gradient of {name}, second run")
            errors[f"{form.__name__} {name}"] = relative(one, other)
    assert max(errors.values()) < 8e-3, errors
    return {"relative_error": errors}


def recurrent_form(chunk):
    """`cpr`: trainer, prefill and decode in any split; single steps; accuracy; a control; two runs of the backward equal."""
    x = make(LENGTHS)
    plan = gdn.Plan(LENGTHS, chunk, device="cuda")
    dirty = lambda slots: dirty_pool(slots, **SHAPE, chunk=chunk, device="cuda", kind=gdn.RecurrentPool)
    base = gdn.cpr(*x, plan, out_dtype=F32)
    full = Engine(x, LENGTHS, dirty(9), list(range(len(LENGTHS))), "cpr")
    full.prefill(dict(enumerate(LENGTHS)))
    assert_bit_equal(full.o, base, "cpr prefill against trainer")
    for seed in range(2):
        slots = random.Random(seed).sample(range(9), len(LENGTHS))
        split = Engine(x, LENGTHS, dirty(9), slots, "cpr").random_run(seed, share=(0.9, 0.3)[seed])
        assert_bit_equal(split.o, base, f"cpr split {seed}")
        for n in range(len(LENGTHS)):
            assert_same_state(split.state(n), full.state(n), f"cpr split {seed}, sequence {n}")
    for BV, warps in ((16, 1), (32, 4), (64, 8)):
        with entries("recur", chunk, BV=BV, num_warps=warps):
            assert_bit_equal(gdn.cpr(*x, plan, out_dtype=F32), base, f"cpr BV {BV}, {warps} warps")
    for length in (1, chunk, 2 * chunk + 1):
        y = make([length], seed=length)
        steps = Engine(y, [length], dirty(1), [0], "cpr").finish()
        assert_bit_equal(steps.o, gdn.cpr(*y, gdn.Plan([length], chunk, device="cuda"), out_dtype=F32), f"cpr {length} steps")
    damaged = Engine(x, LENGTHS, dirty(9), list(range(7)), "cpr")
    damaged.prefill({0: chunk + 3})
    damaged.pool.now[0].view(torch.int32).add_(1)  # of every element: a decay may hide a single one
    damaged.decode([0])
    assert not bit_equal(damaged.o[chunk + 3], base[chunk + 3]), "one ulp of the running state was not seen"
    lengths = [300, 64]
    x = make(lengths)
    error = relative(gdn.cpr(*x, gdn.Plan(lengths, chunk, device="cuda"), out_dtype=F32).bfloat16(), recurrence(*x, lengths)[0])
    assert error < 4.5e-3, error
    weight, runs = torch.randn_like(x[2]), []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in x]
        runs.append(torch.autograd.grad(gdn.cpr(*leaves, gdn.Plan(lengths, chunk, device="cuda")), leaves, weight))
    for one, two, exact in zip(*runs, recurrence_gradients(x, lengths, weight)):
        assert_bit_equal(one, two, "cpr gradient, second run")
        assert relative(one, exact) < 1e-2
    return {"relative_error": error}


def edges(chunk):
    """Convolution, l2norm and gating: fused equals apart, single steps equal the sequence, any split, dirty windows."""
    generator, (H, HV, K, V) = torch.Generator().manual_seed(0), SHAPE.values()
    lengths, D = [45, 0, 1, 200], 2 * H * K + HV * V
    normal = lambda *s: torch.randn(*s, generator=generator).bfloat16().cuda()
    T, heads = sum(lengths), (H, HV, K, V)
    x, a, b, weight = normal(T, D + 64)[:, :D], normal(T, HV) * 5, normal(T, HV) * 5, normal(D, 4)
    A_log, dt_bias = (torch.rand(HV, generator=generator).cuda() for _ in range(2))
    plan = gdn.Plan(lengths, chunk, device="cuda")
    fused = gdn.mixer_inputs(x, a, b, weight, A_log, dt_bias, plan, *heads)
    y, window = gdn.conv1d(x, weight, plan)
    q, k, v = y.split((H * K, H * K, HV * V), -1)
    apart = [gdn.l2norm(q.unflatten(-1, (H, K))), gdn.l2norm(k.unflatten(-1, (H, K))), v.unflatten(-1, (HV, V)).contiguous(),
             *gdn.gating(a, b, A_log, dt_bias), window]  # fmt: skip
    for name, one, other in zip("q k v g beta window".split(), fused, apart):
        assert_bit_equal(one, other, f"fused {name}")
    on_cpu = gdn.mixer_inputs(*(t.cpu() for t in (x, a, b, weight, A_log, dt_bias)), gdn.Plan(lengths, chunk), *heads)
    worst = max(relative(one.cpu(), other) for one, other in zip(fused, on_cpu))
    assert worst < 1e-4, worst
    pool = torch.full((3, 4, D), float("nan"), dtype=torch.bfloat16, device="cuda")[:, :3]
    at = torch.tensor([1], dtype=torch.int32, device="cuda")
    cut = slice(46, 246)
    for start in (0, 1, 3, 50):
        head = gdn.mixer_inputs(x[cut][:start], a[cut][:start], b[cut][:start], weight, A_log, dt_bias,
                                gdn.Plan([start], chunk, device="cuda"), *heads, window=pool[:1].contiguous())  # fmt: skip
        pool[1] = head[-1][0] if start else 0.0
        for t in range(start, start + 6):
            row = slice(46 + t, 47 + t)
            step = gdn.mixer_step_inputs(x[row], a[row], b[row], weight, A_log, dt_bias, pool, at, *heads)
            for name, one, other in zip("q k v g beta".split(), step, fused):
                assert_bit_equal(one, other[row], f"step {t} after {start}, {name}")
        rest = gdn.mixer_inputs(x[cut][start + 6 :], a[cut][start + 6 :], b[cut][start + 6 :], weight, A_log, dt_bias,
                                gdn.Plan([200 - start - 6], chunk, [start + 6], device="cuda"), *heads, window=pool[1:2])  # fmt: skip
        assert_bit_equal(rest[2], fused[2][46 + start + 6 : 246], "rest")
    moved = gdn.mixer_inputs(x, a, b, weight, A_log, nudge(dt_bias, 0, 8), plan, *heads)
    assert not bit_equal(moved[3], fused[3]), "a change of dt_bias was not seen"
    return {"against_cpu_reference": worst}


GATES = (case_parity, single_steps, packing, tiles, many_sequences, hostile_values, inert_lanes, paged_views, graph_replay,
         accuracy, negative_controls, backward, edges, edges_gradient, step, recurrent_form)  # fmt: skip


def main(path: str | None = None, *chosen: str) -> int:
    """``chosen``: chunk sizes and names of gates, by default 16 and all."""
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "kernels": launch.digest(), "gates": {}}
    chunks = [int(word) for word in chosen if word.isdigit()] or [16]
    gates = [gate for gate in GATES if gate.__name__ in chosen] or GATES
    for chunk in chunks:
        for gate in gates:
            started, name = time.time(), f"{gate.__name__}[C={chunk}]"
            try:
                results["gates"][name] = {"passed": True, **(gate(chunk) or {})}
            except Exception as error:  # a gate's failure is a result; the others still run
                results["gates"][name] = {"passed": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            print(name, results["gates"][name], f"{time.time() - started:.1f}s", flush=True)
    if path:
        with open(path, "w") as file:
            json.dump(results, file, indent=1)
    return sum(not g["passed"] for g in results["gates"].values())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
