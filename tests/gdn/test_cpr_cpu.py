"""The form `cpr` on the CPU: one function for trainer, prefill and decode, over bit patterns before the rounding and over state."""

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from tests.gdn.cases import F32, Engine, assert_same_state, dirty_pool, inputs, recurrence, relative, select


def one_shot(x, lengths, chunk=16):
    return gdn.cpr(*x, gdn.Plan(lengths, chunk), out_dtype=F32)


def engine(x, lengths, slots, chunk=16):
    return Engine(x, lengths, dirty_pool(max(slots) + 2, chunk=chunk, kind=gdn.RecurrentPool), slots, form="cpr")


@pytest.mark.parametrize("chunk, length", [(16, 1), (16, 15), (16, 16), (16, 17), (16, 65), (32, 33), (64, 130)])
def test_single_steps_equal_one_shot(chunk, length):
    x = inputs([length], seed=length)
    steps = engine(x, [length], [1], chunk).finish()
    whole = engine(x, [length], [0], chunk)
    whole.prefill({0: length})
    base = one_shot(x, [length], chunk)
    assert_bit_equal(steps.o, base, "decode against trainer")
    assert_bit_equal(whole.o, base, "prefill against trainer")
    assert_same_state(steps.state(0), whole.state(0), "decode against prefill")


@pytest.mark.parametrize("seed", range(3))
def test_any_split_of_a_ragged_batch(seed):
    lengths = [37, 1, 64, 20, 33]
    x = inputs(lengths, seed=seed)
    split = engine(x, lengths, [0, 2, 7, 4, 1]).random_run(seed)
    base = one_shot(x, lengths)
    assert_bit_equal(split.o, base, "split")
    for first, length in ((0, 37), (38, 64)):
        assert_bit_equal(one_shot(select(x, range(first, first + length)), [length]), base[first : first + length], "alone")


@pytest.mark.parametrize("chunk", [16, 64])
def test_is_the_delta_rule(chunk):
    x = inputs([150, 40], H=2, HV=4)
    expected, _ = recurrence(*x, [150, 40])
    got, chunked = one_shot(x, [150, 40], chunk), gdn.cpr_wy(*x, gdn.Plan([150, 40], chunk), out_dtype=F32)
    assert relative(got, expected) < 0.01
    assert not bit_equal(got, chunked) and relative(got, expected) <= relative(chunked, expected)


def test_gradients():
    x = [t.requires_grad_() for t in inputs([40, 9])]
    one_shot(x, [40, 9]).square().sum().backward()
    exact = [t.detach().double().requires_grad_() for t in x]
    recurrence_in_place_free(*exact, [40, 9]).square().sum().backward()
    for name, a, b in zip("q k v g beta".split(), x, exact):
        assert relative(a.grad, b.grad) < 0.02, name


def recurrence_in_place_free(q, k, v, g, beta, lengths):
    from isoexec.ops.gdn.gradient import smooth

    return smooth(q, k, v, g, beta, gdn.Plan(lengths, 64), q.shape[-1] ** -0.5)


def test_one_ulp_of_the_running_state_shows():
    x = inputs([24])
    run = [engine(x, [24], [0]) for _ in range(2)]
    for e in run:
        e.prefill({0: 20})
    run[1].pool.now[0] = nudge(run[1].pool.now[0], index=int(run[1].pool.now[0].abs().argmax()))
    for e in run:
        e.finish()
    assert_bit_equal(run[0].o, one_shot(x, [24]))
    assert not bit_equal(run[1].o[20:], run[0].o[20:])


def test_resynchronised_at_the_boundary():
    """After a chunk fills, the running state is not read: poison in it changes nothing."""
    x = inputs([40])
    e = engine(x, [40], [0])
    e.prefill({0: 32})
    e.pool.now.fill_(float("nan"))
    assert_bit_equal(e.finish().o, one_shot(x, [40]))


def test_inert_lanes_and_refusals():
    x = inputs([3])
    pool = dirty_pool(3, kind=gdn.RecurrentPool)
    slots, positions = torch.tensor([-1, 2, 0], dtype=torch.int32), torch.tensor([5, 0, 9], dtype=torch.int32)
    o = gdn.cpr_decode(*x, pool, slots, positions, null_slot=0, out_dtype=F32)
    assert_bit_equal(o[[0, 2]], torch.zeros_like(o[[0, 2]]), "inert output")
    assert o[1].abs().sum() > 0 and pool.now[:2].isnan().all()
    x[2][1] = float("inf")
    with pytest.raises(ContractError, match="op gdn.cpr: v of row 1 is not finite"):
        one_shot(x, [3])
