"""The core on the CPU: one function for trainer, prefill and decode, over bit patterns before the rounding and over state."""

import itertools

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from tests.gdn.cases import (Engine, assert_same_state, dirty_pool, inputs, one_shot, recurrence, relative,
                             select)  # fmt: skip

LENGTHS = [(16, n) for n in (1, 15, 16, 17, 31, 63, 64, 65, 127, 129, 300)]
LENGTHS += [(32, n) for n in (31, 32, 65)] + [(64, n) for n in (63, 64, 65, 129)]


@pytest.mark.parametrize("chunk,length", LENGTHS)
def test_single_steps_equal_one_shot(chunk, length):
    x = inputs([length], seed=length)
    engine = Engine(x, [length], dirty_pool(2, chunk=chunk), [1]).finish()
    whole = Engine(x, [length], dirty_pool(2, chunk=chunk), [0])
    whole.prefill({0: length})
    base = one_shot(x, [length], chunk)
    assert_bit_equal(engine.o, base, "decode against trainer")
    assert_bit_equal(whole.o, base, "prefill against trainer")
    assert_same_state(engine.state(0), whole.state(0), "decode against prefill")


@pytest.mark.parametrize("chunk", [16, 32])
@pytest.mark.parametrize("seed", range(4))
def test_any_split_of_a_ragged_batch(seed, chunk):
    lengths = [37, 1, 64, 20, 70, 33]
    x = inputs(lengths, seed=seed)
    base = one_shot(x, lengths, chunk)
    whole = Engine(x, lengths, dirty_pool(9, chunk=chunk), [5, 1, 2, 8, 3, 0])
    whole.prefill(dict(enumerate(lengths)))
    split = Engine(x, lengths, dirty_pool(9, chunk=chunk), [0, 2, 7, 4, 6, 1]).random_run(seed)
    assert_bit_equal(whole.o, base, "prefill")
    assert_bit_equal(split.o, base, "split")
    for n in range(len(lengths)):
        assert_same_state(split.state(n), whole.state(n), f"sequence {n}")


@pytest.mark.parametrize("cut", range(1, 50))
def test_every_two_piece_split(cut):
    x = inputs([50], seed=7)
    engine = Engine(x, [50], dirty_pool(1), [0])
    engine.prefill({0: cut})
    engine.prefill({0: 50 - cut})
    assert_bit_equal(engine.o, one_shot(x, [50], 16), f"cut at {cut}")


def test_packed_equals_separate_and_repeated_cu_seqlens():
    lengths = [0, 40, 0, 0, 17, 1, 0]
    x = inputs(lengths, HV=4, H=2)
    packed = one_shot(x, lengths, 16)
    same = gdn.cpr_wy(*x, gdn.Plan.from_cu_seqlens([0, 0, 40, 40, 40, 57, 58, 58], 16), out_dtype=torch.float32)
    assert_bit_equal(packed, same, "from cu_seqlens")
    for first, length in ((0, 40), (40, 17), (57, 1)):
        alone = one_shot(select(x, range(first, first + length)), [length], 16)
        assert_bit_equal(packed[first : first + length], alone, f"rows from {first}")


def test_heads_do_not_see_each_other():
    """A tensor-parallel rank holds some of the heads: same bits."""
    x = inputs([45], H=4, HV=8)
    base = one_shot(x, [45], 16)
    for rank in range(4):
        q, k = (t[:, rank : rank + 1] for t in x[:2])
        v, g, beta = (t[:, 2 * rank : 2 * rank + 2] for t in x[2:])
        assert_bit_equal(one_shot([q, k, v, g, beta], [45], 16), base[:, 2 * rank : 2 * rank + 2].contiguous(), f"rank {rank}")


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17, 64])
def test_decode_lane_does_not_depend_on_the_batch(batch):
    lengths = [21] * batch
    x = inputs(lengths)
    engine = Engine(x, lengths, dirty_pool(batch), list(range(batch)))
    engine.prefill(dict.fromkeys(range(batch), 17))
    engine.finish()
    solo = Engine(select(x, range(21)), [21], dirty_pool(1), [0])
    solo.prefill({0: 21})
    assert_bit_equal(engine.o[:21], solo.o, "first lane")


def test_mixed_step_equals_separate_steps():
    """A step that decodes some sequences and prefills others may be run as one packed piece (lengths of 1 are decodes)."""
    lengths = [30, 40]
    x = inputs(lengths)
    mixed, apart = (Engine(x, lengths, dirty_pool(2), [0, 1]) for _ in range(2))
    for engine in (mixed, apart):
        engine.prefill({0: 29})
    mixed.prefill({0: 1, 1: 40})
    apart.decode([0])
    apart.prefill({1: 40})
    assert_bit_equal(mixed.o, apart.o, "mixed")
    for n in range(2):
        assert_same_state(mixed.state(n), apart.state(n), f"sequence {n}")


def test_inert_lanes_change_nothing():
    x = inputs([3])
    pool = dirty_pool(3)
    before = [t.clone() for t in pool.tensors()]
    slots, positions = torch.tensor([-1, 2, 0], dtype=torch.int32), torch.tensor([5, 0, 9], dtype=torch.int32)
    o = gdn.cpr_wy_decode(*x, pool, slots, positions, null_slot=0, out_dtype=torch.float32)
    assert_bit_equal(o[[0, 2]], torch.zeros_like(o[[0, 2]]), "inert output")
    assert bool(o[1].abs().sum() > 0)
    for old, new in zip(before, pool.tensors()):
        assert_bit_equal(old[:2], new[:2], "other slots")


@pytest.mark.parametrize("last", [16, 21, 33])
def test_huge_finite_later_rows_change_nothing_before_them(last):
    x = inputs([48])
    base = one_shot(x, [48], 16)
    huge = [t.clone() for t in x]
    huge[2][last:] = 1e30
    changed = one_shot(huge, [48], 16)
    assert_bit_equal(changed[:last], base[:last], "earlier rows")
    assert not bit_equal(changed[last:], base[last:])


@pytest.mark.parametrize("field,value", list(itertools.product(range(5), [float("nan"), float("inf")])))
def test_non_finite_row_is_refused_by_name(field, value):
    x = inputs([20])
    x[field][11] = value
    with pytest.raises(ContractError, match=f"gdn.cpr_wy: {'q k v g beta'.split()[field]} of row 11 "):
        one_shot(x, [20], 16)


def test_subnormals_and_extreme_gates_keep_parity():
    x = inputs([70], seed=3)
    x[3][5::7] = -200.0  # e^g is 0
    x[3][3::11] = 0.0
    x[4][2::5] = 0.0
    x[4][4::9] = 1.0
    x[2][10:20] = 1e-39  # subnormal in bf16
    x[4][12:18] = 1e-38
    engine = Engine(x, [70], dirty_pool(1), [0]).finish()
    base = one_shot(x, [70], 16)
    assert_bit_equal(engine.o, base, "decode")
    assert bool(torch.isfinite(base).all())


@pytest.mark.parametrize("chunk,bound", [(16, 1.0e-2), (32, 1.4e-2), (64, 2.4e-2)])
def test_identical_keys_without_decay_stay_accurate(chunk, bound):
    x = inputs([256], H=1, HV=2, K=128, V=128, seed=5)
    x[1][:] = x[1][:1].clone()
    x[3].zero_()
    x[4].fill_(1.0)
    assert relative(one_shot(x, [256], chunk), recurrence(*x, [256])[0]) < bound


@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_accuracy_against_fp64(chunk):
    lengths = [130, 64, 200]
    x = inputs(lengths, K=128, V=128, H=1, HV=2)
    o, S = recurrence(*x, lengths)
    assert relative(one_shot(x, lengths, chunk), o) < 4.5e-3
    engine = Engine(x, lengths, dirty_pool(3, K=128, V=128, chunk=chunk), [0, 1, 2])
    engine.prefill(dict(enumerate(lengths)))
    assert relative(engine.state(1)[0], S[1]) < 5e-3


# Negative controls: one unit in the last place of one stored value must be seen.


def _resume(damage, decay=1.0):
    x = inputs([40])
    x[3] *= decay
    engine = Engine(x, [40], dirty_pool(1), [0])
    engine.prefill({0: 25})
    damage(engine.pool)
    engine.finish()
    return engine, one_shot(x, [40], 16)


def test_one_ulp_of_decay_is_seen_in_the_output():
    engine, base = _resume(lambda pool: pool.gates[0, 0, 0].copy_(nudge(pool.gates[0, 0, 0], 8)))
    assert bit_equal(engine.o[:25], base[:25]) and not bit_equal(engine.o, base)


def test_one_ulp_of_state_is_seen_in_the_state():
    def damage(pool):
        S = gdn.join_planes(pool.high[0], pool.low[0])
        S = nudge(S, int(S.abs().argmax()))
        pool.high[0], pool.low[0] = gdn.split_planes(S)

    engine, _ = _resume(damage, decay=0.01)  # a strong decay would forget the change, as it should
    x = engine.x
    whole = Engine(x, [40], dirty_pool(1), [0])
    whole.prefill({0: 40})
    with pytest.raises(AssertionError, match=", S: "):
        assert_same_state(engine.state(0), whole.state(0), "damaged")


@pytest.mark.parametrize("field", ["k", "rhs"])
def test_one_ulp_of_a_stored_row_is_seen(field):
    def damage(pool):
        row = getattr(pool, field)[0, 0, 4]
        row.copy_(nudge(row, 3))

    engine, base = _resume(damage)
    assert not bit_equal(engine.o, base)


def test_planes_are_lossless_and_ties_round_away():
    bits = torch.cat([torch.randint(-(2**31), 2**31 - 1, (100000,), dtype=torch.int64).int(),
                      torch.tensor([0x3F808000, 0x3F818000, 0, -(2**31), 0x7F7FFFFF, 1], dtype=torch.int32)])  # fmt: skip
    high, low = gdn.split_planes(bits.view(torch.float32))
    assert_bit_equal(gdn.join_planes(high, low).view(torch.int32), bits, "round trip")
    assert high.view(torch.int16)[-6:-4].tolist() == [0x3F81, 0x3F82]


def test_state_memory_is_within_a_quarter_of_native():
    H, HV, K, V = 16, 32, 128, 128
    for chunk in (16, 32):
        spec = gdn.StatePool.spec(H, HV, K, V, chunk)
        size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in spec.values())
        assert size <= 1.25 * HV * K * V * 4
