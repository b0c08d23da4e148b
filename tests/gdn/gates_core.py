"""Gates of the core, of either form: bit parity over fp32 before the rounding and over state."""

from __future__ import annotations

import random

import torch

from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.gdn import launch
from tests.gdn.cases import F32, assert_same_state, one_shot, recurrence, relative, select
from tests.gdn.gate_tools import (HEADS, LENGTHS, captured, engine, entries, ints, launched, make, no_host_sync, poisoned, pool, raises,
                                  same_state, stepped, whole)  # fmt: skip
from tests.gdn.gradient_cases import NAMES, gradients

CHAIN_TILES = [(16, 1), (32, 2), (32, 4), (64, 4), (64, 2), (128, 8)]
RECUR_TILES = [(16, 1), (32, 4), (64, 8)]
WHOLE_CHUNKS = [
    dict(BV=64, num_warps=4, stages=stages, held=held, output_warps=warps, registers=88, maxnreg=168)
    for stages, held, warps in ((3, 1, 4), (4, 3, 2))
]
DECODE_TILES = [(1, 32, 2), (1, 64, 4), (1, 128, 8), (2, 32, 1), (2, 32, 2), (2, 64, 4), (2, 128, 4), (2, 128, 8)]


def case_parity(form, chunk):
    """Trainer, prefill in one piece, random splits with ragged decode: outputs and states."""
    x = make(LENGTHS)
    base, full = one_shot(x, LENGTHS, chunk, form), whole(form, x, LENGTHS, chunk)
    assert_bit_equal(full.o, base, "prefill against trainer")
    for seed in range(3):
        slots = random.Random(seed).sample(range(9), len(LENGTHS))
        split = engine(form, x, LENGTHS, chunk, slots).random_run(seed, share=(0.9, 0.3, 0.6)[seed])
        assert_bit_equal(split.o, base, f"split {seed}")
        for n in range(len(LENGTHS)):
            assert_same_state(split.state(n), full.state(n), f"split {seed}, sequence {n}")


def single_steps(form, chunk):
    """From an empty slot, token by token."""
    for length in (1, 15, 16, 17, 31, 33, 65, 129):
        x = make([length], seed=length)
        steps = engine(form, x, [length], chunk).finish()
        assert_bit_equal(steps.o, one_shot(x, [length], chunk, form), f"{length} steps")
        assert_same_state(steps.state(0), whole(form, x, [length], chunk).state(0), f"{length} steps")


def packing(form, chunk):
    """Each sequence alone; some heads alone (a tensor-parallel rank)."""
    x = make(LENGTHS)
    base, first = one_shot(x, LENGTHS, chunk, form), 0
    for length in LENGTHS:
        if length:
            alone = one_shot(select(x, range(first, first + length)), [length], chunk, form)
            assert_bit_equal(alone, base[first : first + length], f"sequence of {length}")
        first += length
    rank = [t[:, 1:2].contiguous() for t in x[:2]] + [t[:, 2:4].contiguous() for t in x[2:]]
    assert_bit_equal(one_shot(rank, LENGTHS, chunk, form), base[:, 2:4].contiguous(), "heads 2 and 3")


def empty_batches(form, chunk):
    """No sequence, no token, no lane: nothing computed, nothing touched."""
    nothing = [t[:0] for t in make([1])]
    shape = (0, HEADS[1], HEADS[3])
    for lengths in ([], [0], [0, 0, 0]):
        assert one_shot(nothing, lengths, chunk, form).shape == shape
        found = gradients(form, nothing, lengths, chunk, nothing[2])
        assert [g.shape for g in found] == [t.shape for t in nothing]
    p = pool(form, 3, chunk)
    before = [t.clone() for t in p.tensors()]
    for lengths in ([], [0], [0, 0]):
        plan, slots = gdn.Plan(lengths, chunk, [5] * len(lengths), "cuda"), ints(*range(len(lengths)))
        assert getattr(gdn, f"{form}_prefill")(*nothing, plan, p, slots, out_dtype=F32).shape == shape
    assert getattr(gdn, f"{form}_decode")(*nothing, p, ints(), ints(), out_dtype=F32).shape == shape
    for old, new in zip(before, p.tensors()):
        assert_bit_equal(new, old, "pool")


def whole_chunks(form, chunk):
    """Whole chunks in a launch of their own, whatever begins and ends a call: the outputs and states of one launch over all."""
    x = make(LENGTHS)
    base, full = one_shot(x, LENGTHS, chunk, form), whole(form, x, LENGTHS, chunk)
    for setting in WHOLE_CHUNKS:
        limits = {**launch.settings("limits"), "hopper_chunks": 1}
        with entries("limits", None, **limits), entries("chain_roles", chunk, **setting):
            for first in ({}, {0: 5, 2: chunk, 4: chunk + 7, 6: 2}, {0: 100, 2: 250, 4: chunk + 1, 6: 31}):
                run = engine(form, x, LENGTHS, chunk, [3, 0, 5, 1, 6, 2, 4])
                run.prefill(first)
                rest = {n: LENGTHS[n] - first.get(n, 0) for n in range(len(LENGTHS))}
                names = launched(lambda: run.prefill(rest), warm=False)
                assert "chain_roles_kernel" in names, names
                assert_bit_equal(run.o, base, f"{setting}, after {first}")
                for n in range(len(LENGTHS)):
                    assert_same_state(run.state(n), full.state(n), f"{setting}, after {first}, sequence {n}")


def poisoned_workspaces(form, chunk):
    """Workspaces and outputs that hold NaN before a launch change nothing; neither do slots."""
    lengths = [chunk * 2 + 5, 0, 3, chunk + 1]
    x, weight = make(lengths), make(lengths, seed=1)[2]
    base, clean = one_shot(x, lengths, chunk, form), gradients(form, x, lengths, chunk, weight)
    full = whole(form, x, lengths, chunk)
    with poisoned():
        assert_bit_equal(one_shot(x, lengths, chunk, form), base, "trainer")
        for name, a, b in zip(NAMES, gradients(form, x, lengths, chunk, weight), clean):
            assert_bit_equal(a, b, f"gradient of {name}")
        for two in (0, 1):
            with entries("decode", chunk, BV=32, num_warps=2, two_launches=two):
                split = engine(form, x, lengths, chunk, [3, 1, 0, 2])
                split.prefill({0: chunk + 3, 1: 0, 3: 2})
                assert_bit_equal(split.finish().o, base, f"split, decode in {two + 1} launches")
            for n in range(len(lengths)):
                assert_same_state(split.state(n), full.state(n), f"sequence {n}")


def tiles(form, chunk):
    """No tile, warp or launch count changes a bit."""
    x = make(LENGTHS)
    base = one_shot(x, LENGTHS, chunk, form)
    same = lambda what: assert_bit_equal(one_shot(x, LENGTHS, chunk, form), base, what)
    for BV, warps in CHAIN_TILES if chunk < 64 else CHAIN_TILES[2:]:
        for stages, unroll in ((1, 1), (2, 4), (3, 2)) if chunk < 32 and BV * warps <= 64 else ((2, 1),):
            setting = dict(BV=BV, num_warps=warps, stages=stages, unroll=unroll)
            with entries("chain", chunk, **setting), entries("chain_narrow", chunk, **setting):
                same(f"chain BV {BV}, {warps} warps, {stages} stages, unroll {unroll}")


def other_tiles(form, chunk):
    """Nor one of the launches around the chain."""
    x = make(LENGTHS)
    base, full = one_shot(x, LENGTHS, chunk, form), whole(form, x, LENGTHS, chunk)
    same = lambda what: assert_bit_equal(one_shot(x, LENGTHS, chunk, form), base, what)
    for warps in (1, 2, 4):
        with entries("prepass", chunk, num_warps=warps):
            same(f"pre-pass of {warps} warps")
        with entries("tail", chunk, num_warps=warps):
            tailed = whole(form, x, LENGTHS, chunk)
            for n in range(len(LENGTHS)):
                assert_same_state(tailed.state(n), full.state(n), f"tail of {warps} warps, sequence {n}")
    for BV, warps in RECUR_TILES if form == "cpr" else ():
        with entries("recur", chunk, BV=BV, num_warps=warps):
            same(f"recurrence BV {BV}, {warps} warps")


def decode_tiles(form, chunk):
    """Nor one of a decode step."""
    lengths = [chunk * 2 + 5, 3, chunk + 1]
    x = make(lengths)
    base = one_shot(x, lengths, chunk, form)
    same = lambda what: assert_bit_equal(engine(form, x, lengths, chunk, [2, 0, 1]).finish().o, base, what)
    for launches, BV, warps in DECODE_TILES if chunk < 64 else DECODE_TILES[1:2] + DECODE_TILES[-2:]:
        extra = {"two_launches": 1} if launches == 2 else {}
        with entries("decode", chunk, BV=BV, num_warps=warps, **extra), entries("decode_main", chunk, BV=BV, num_warps=warps, **extra):
            same(f"decode in {launches} launches, BV {BV}, {warps} warps")
    for warps in (1, 2, 4):
        with entries("decode", chunk, BV=64, num_warps=4, two_launches=1), entries("decode_pre", chunk, num_warps=warps):
            same(f"first launch of {warps} warps")
    for BV, warps in RECUR_TILES if form == "cpr" else ():
        with entries("recur_step", chunk, BV=BV, num_warps=warps):
            same(f"recurrence step BV {BV}, {warps} warps")


def many_sequences(form, chunk):
    """1 to 512 ragged sequences: decode and prefill do not depend on the batch."""
    lengths, few = [1 + (37 * n) % 70 for n in range(512)], dict(H=1, HV=2)
    x = make(lengths, **few)
    base = one_shot(x, lengths, chunk, form)
    for count in (1, 2, 3, 8, 17, 64, 257, 512):
        rows = range(sum(lengths[:count]))
        run = engine(form, select(x, rows), lengths[:count], chunk, **few)
        run.prefill({n: lengths[n] // 2 for n in range(count)})
        run.finish()
        assert_bit_equal(run.o, base[: len(rows)].contiguous(), f"{count} sequences")


def hostile_values(form, chunk):
    """Huge finite later rows, subnormals, extreme gates."""
    x = make([80])
    base = one_shot(x, [80], chunk, form)
    for last in (16, 21, 50):
        huge = [t.clone() for t in x]
        huge[2][last:] = 1e30
        changed = one_shot(huge, [80], chunk, form)
        assert_bit_equal(changed[:last], base[:last], f"huge rows from {last}")
        assert not bit_equal(changed[last:], base[last:])
    x[3][5::7] = -200.0
    x[3][3::11] = 0.0
    x[4][2::5] = 0.0
    x[4][4::9] = 1.0
    x[2][10:20] = 1e-39
    x[4][12:18] = 1e-38
    base = one_shot(x, [80], chunk, form)
    assert bool(torch.isfinite(base).all())
    assert_bit_equal(engine(form, x, [80], chunk).finish().o, base, "subnormals and extreme gates")
    x[2][44] = float("nan")
    assert not bool(torch.isfinite(one_shot(x, [80], chunk, form)[44]).any()), "a non-finite row must not look finite"


def inert_lanes(form, chunk):
    x = make([3])
    p = pool(form, 3, chunk)
    before = [t.clone() for t in p.tensors()]
    for two in (0, 1):
        with entries("decode", chunk, BV=32, num_warps=2, two_launches=two):
            o = getattr(gdn, f"{form}_decode")(*x, p, ints(-1, 2, 0), ints(5, 0, 9), null_slot=0, out_dtype=F32)
        assert_bit_equal(o[[0, 2]], torch.zeros_like(o[[0, 2]]), "inert output")
        for old, new in zip(before, p.tensors()):
            assert_bit_equal(old[:2], new[:2], "other slots")


def paged_views(form, chunk):
    """A pool made of views into pages larger than a slot."""
    x, slots = make([70]), pool(form, 5, chunk)
    paged = type(slots)(*(torch.cat([t, t.clone()], 1)[:, : t.shape[1]] for t in slots.tensors()))
    assert paged.high.stride(0) == 2 * slots.high.stride(0)
    run = engine(form, x, [70], chunk, [3])
    run.pool = paged
    run.prefill({0: 33})
    assert_bit_equal(run.finish().o, one_shot(x, [70], chunk, form), "paged")


def graph_replay(form, chunk):
    """Decode captured once and replayed: positions and slots are read on the device."""
    lengths = [2 * chunk + 3] * 3
    x = make(lengths)
    base = one_shot(x, lengths, chunk, form)
    for two in (0, 1):
        p, static = pool(form, 4, chunk), [t[:3].clone() for t in x]
        slots, positions = ints(3, 0, 2), ints(0, 0, 0)
        with entries("decode", chunk, BV=64, num_warps=4, two_launches=two):
            graph, o = captured(lambda: getattr(gdn, f"{form}_decode")(*static, p, slots, positions, out_dtype=F32))
        for t in range(lengths[0]):
            rows = stepped(lengths, t)
            for buffer, source in zip(static, x):
                buffer.copy_(source[rows])
            positions.fill_(t)
            graph.replay()
            assert_bit_equal(o, base[rows], f"replay, token {t}, {two + 1} launches")


def launches(form, chunk):
    """A decode step is at most two launches on a small batch; no step waits for the GPU."""
    counts, heads = {}, dict(H=16, HV=32)
    for lanes in (1, 8, 16, 64):
        x, p = make([lanes], **heads), pool(form, lanes, chunk, **heads)
        slots, positions = ints(*range(lanes)), ints(*[70] * lanes)
        run = lambda: getattr(gdn, f"{form}_decode")(*x, p, slots, positions)
        names = launched(run)
        assert names and len(names) <= (3 if form == "cpr" and lanes > 16 else 2), names
        counts[str(lanes)] = len(names)
        with no_host_sync():
            run()
    x, run, plan = make(LENGTHS), engine(form, make(LENGTHS), LENGTHS, chunk), gdn.Plan(LENGTHS, chunk, device="cuda")
    slots = ints(*run.slots)
    with no_host_sync():
        getattr(gdn, f"{form}_prefill")(*x, plan, run.pool, slots)
        getattr(gdn, form)(*x, plan)
        assert raises(RuntimeError, lambda: x[3].sum().item()), "a wait for the GPU was not seen"
    return {"launches_of_a_step": counts}


def accuracy(form, chunk):
    """Error against the token recurrence in fp64: at most that of fla's chunk kernel on the same inputs."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def native(x, lengths):
        q, k, v, g, beta = (t[None] for t in x)
        cu = torch.tensor(gdn.Plan(lengths, chunk).offsets, device="cuda")
        return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=cu)[0][0]

    lengths = [1000, 64, 333]
    x = make(lengths)
    exact, _ = recurrence(*x, lengths)
    ours, theirs = relative(one_shot(x, lengths, chunk, form).bfloat16(), exact), relative(native(x, lengths), exact)
    assert ours <= theirs, (ours, theirs)
    on_cpu = getattr(gdn, form)(*(t.cpu() for t in x), gdn.Plan(lengths, chunk), out_dtype=F32)
    against = relative(one_shot(x, lengths, chunk, form).cpu(), on_cpu)
    assert against < 2e-3, against
    same = make([256], seed=5)
    same[1][:] = same[1][:1].clone()
    same[3].zero_()
    same[4].fill_(1.0)
    exact = recurrence(*same, [256])[0]
    adversarial = relative(one_shot(same, [256], chunk, form).bfloat16(), exact), relative(native(same, [256]), exact)
    assert adversarial[0] <= adversarial[1], adversarial
    return {"relative_error": ours, "native_chunk": theirs, "against_cpu_reference": against, "identical_keys": adversarial[0],
            "identical_keys_native_chunk": adversarial[1]}  # fmt: skip


def negative_controls(form, chunk):
    """One ulp of a stored decay, key, right-hand side or running state must be seen in the output, one of the state in the state."""
    length, cut = chunk * 4, 2 * chunk + chunk // 2

    def run(damage, decay):
        x = make([length])
        x[3] *= decay  # a strong decay forgets a change of S, a weak one hides a change of G: as each should
        run = engine(form, x, [length], chunk)
        run.prefill({0: cut})
        damage(run.pool)
        return run.finish(), whole(form, x, [length], chunk)

    def put(field, index, flat):
        return lambda p: getattr(p, field)[index].copy_(nudge(getattr(p, field)[index], flat))

    def state(p):
        S = gdn.join_planes(p.high[0], p.low[0])
        p.high[0], p.low[0] = gdn.split_planes(nudge(S, slice(None)))  # of every element: what is added may round one away

    def decay(p):
        # One ulp in every head: a head that hardly decays hides it in exp, one that decays fast has forgotten the state.
        row = p.gates[0, :, 0]
        for head in range(row.shape[0]):
            row[head] = nudge(row[head], chunk // 2 - 1)

    damages = {"decay": decay, "k": put("k", (0, 1, 3), 7), "rhs": put("rhs", (0, 1, 3), 7)}
    if form == "cpr":
        damages["running state"] = put("now", 0, slice(None))
    for factor in (1.0, 0.01):
        run_, full = run(lambda p: None, factor)
        assert_bit_equal(run_.o, full.o, "undamaged")
        assert_same_state(run_.state(0), full.state(0), "undamaged")
    for name, damage in damages.items():
        damaged, full = run(damage, 1.0)
        assert bit_equal(damaged.o[:cut], full.o[:cut]) and not bit_equal(damaged.o, full.o), f"one ulp of {name} was not seen"
    damaged, full = run(state, 0.01)
    assert not same_state(damaged.state(0), full.state(0)), "one ulp of S was not seen"
