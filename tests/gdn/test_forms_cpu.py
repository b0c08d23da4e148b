"""What both forms of the core promise on the CPU, over bit patterns before the rounding and over state."""

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import gdn
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from tests.gdn.cases import F32, assert_same_state, dirty_pool, engine_of, inputs, one_shot, select
from tests.ops.op_checks import same_bits

NAMES = "q k v g beta".split()


@pytest.fixture(params=sorted(gdn.POOLS))
def form(request):
    return request.param


CUTS = [(16, 50, range(1, 50)), (64, 150, (1, 63, 64, 65, 127, 128, 129, 149))]


@pytest.mark.parametrize("chunk, length, cuts", CUTS, ids=("C16", "C64"))
def test_every_two_piece_split(form, chunk, length, cuts):
    """All cuts as sequences of one batch, whose rows are the same."""
    x = [t.repeat(len(cuts), *[1] * (t.dim() - 1)) for t in inputs([length], seed=7)]
    split, whole = (engine_of(form, x, [length] * len(cuts), chunk=chunk) for _ in range(2))
    split.prefill(dict(enumerate(cuts)))
    split.prefill({n: length - cut for n, cut in enumerate(cuts)})
    whole.prefill(dict.fromkeys(range(len(cuts)), length))
    base = one_shot(select(x, range(length)), [length], chunk, form)
    for n, (cut, rows) in enumerate(zip(cuts, split.o.split(length))):
        same_bits(rows, base, f"cut at {cut}")
        assert_same_state(split.state(n), whole.state(n), f"cut at {cut}")


def test_packed_equals_separate_and_repeated_cu_seqlens(form):
    lengths = [0, 40, 0, 0, 17, 1, 0]
    x = inputs(lengths, HV=4, H=2)
    packed = one_shot(x, lengths, form=form)
    same = getattr(gdn, form)(*x, gdn.Plan.from_cu_seqlens([0, 0, 40, 40, 40, 57, 58, 58], 16), out_dtype=F32)
    same_bits(packed, same, "from cu_seqlens")
    for first, length in ((0, 40), (40, 17), (57, 1)):
        alone = one_shot(select(x, range(first, first + length)), [length], form=form)
        same_bits(packed[first : first + length], alone, f"rows from {first}")


def test_heads_do_not_see_each_other(form):
    """A tensor-parallel rank holds some of the heads: same bits."""
    x = inputs([45], H=4, HV=8)
    base = one_shot(x, [45], form=form)
    for rank in range(4):
        mine = [t[:, rank : rank + 1] for t in x[:2]] + [t[:, 2 * rank : 2 * rank + 2] for t in x[2:]]
        same_bits(one_shot(mine, [45], form=form), base[:, 2 * rank : 2 * rank + 2].contiguous(), f"rank {rank}")


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 17, 64])
def test_decode_lane_does_not_depend_on_the_batch(form, batch):
    lengths = [21] * batch
    x = inputs(lengths)
    engine = engine_of(form, x, lengths)
    engine.prefill(dict.fromkeys(range(batch), 17))
    engine.finish()
    solo = engine_of(form, select(x, range(21)), [21])
    solo.prefill({0: 21})
    same_bits(engine.o[:21], solo.o, "first lane")
    assert_same_state(engine.state(0), solo.state(0), "first lane")


def test_mixed_step_equals_separate_steps(form):
    """A step that decodes some sequences and prefills others may be run as one packed piece (lengths of 1 are decodes)."""
    lengths = [30, 40]
    x = inputs(lengths)
    mixed, apart = (engine_of(form, x, lengths) for _ in range(2))
    for engine in (mixed, apart):
        engine.prefill({0: 29})
    mixed.prefill({0: 1, 1: 40})
    apart.decode([0])
    apart.prefill({1: 40})
    same_bits(mixed.o, apart.o, "mixed")
    for n in range(2):
        assert_same_state(mixed.state(n), apart.state(n), f"sequence {n}")


def test_inert_lanes_change_nothing(form):
    """They bring NaN, and the slots they name hold NaN bits."""
    x = inputs([3])
    alone = one_shot(select(x, [1]), [1], form=form)
    for t in x:
        t[[0, 2]] = float("nan")
    pool = engine_of(form, x, [3], [1]).pool
    before = [t.clone() for t in pool.tensors()]
    slots, positions = torch.tensor([-1, 2, 0], dtype=torch.int32), torch.tensor([5, 0, 9], dtype=torch.int32)
    o = getattr(gdn, f"{form}_decode")(*x, pool, slots, positions, null_slot=0, out_dtype=F32)
    same_bits(o[[0, 2]], torch.zeros_like(o[[0, 2]]), "inert output")
    same_bits(o[1:2], alone, "the live lane")
    for old, new in zip(before, pool.tensors()):
        assert_bit_equal(old[:2], new[:2], "other slots")


@pytest.mark.parametrize("field", ["q", "v"])
@pytest.mark.parametrize("last", [16, 21, 33])
def test_huge_finite_later_rows_change_nothing_before_them(form, last, field):
    x = inputs([48])
    base = one_shot(x, [48], form=form)
    huge = [t.clone() for t in x]
    huge[NAMES.index(field)][last:] = 3e38
    changed = one_shot(huge, [48], form=form)
    same_bits(changed[:last], base[:last], "earlier rows")
    assert not bit_equal(changed[last:], base[last:])


def assert_refused(x, form, match):
    """The trainer, a prefill and the decode step that meets the row refuse it."""
    with pytest.raises(ContractError, match=match):
        one_shot(x, [20], form=form)
    with pytest.raises(ContractError, match=match):
        engine_of(form, x, [20]).prefill({0: 20})
    engine = engine_of(form, x, [20])
    engine.prefill({0: 11})
    with pytest.raises(ContractError, match=match.replace("row 11", "row 0")):
        engine.decode([0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("field", NAMES)
def test_non_finite_row_is_refused_by_name(form, field, value):
    x = inputs([20])
    x[NAMES.index(field)][11] = value
    assert_refused(x, form, f"op gdn.{form}: {field} of row 11 is not finite")


@pytest.mark.parametrize("field, value", [("k", 1e10), ("k", -2.5), ("g", 1e10), ("g", 1e-3), ("beta", 1e10), ("beta", -0.5)])
def test_a_finite_row_outside_the_domain_is_refused_by_name(form, field, value):
    x = inputs([20])
    x[NAMES.index(field)][11] = value
    assert_refused(x, form, f"op gdn.{form}: {field} of row 11 is .*; expected ")


@pytest.mark.parametrize("field", ["v", "g"])
def test_rows_that_overflow_together_are_refused(form, field):
    """Each is in its domain; their difference or sum is not in fp32, and 0 * inf would reach the chunk's earlier rows."""
    x = inputs([48])
    x[1][21:], x[4][21:] = x[1][21].clone(), 1.0
    if field == "v":
        x[3][21:] = 0.0
        x[2][21::2], x[2][22::2] = 3e38, -3e38
    else:
        x[3][21:] = -3e38
    with pytest.raises(ContractError, match="op gdn: rows of one chunk leave the range of fp32 together"):
        one_shot(x, [48], form=form)


def test_subnormals_signed_zeros_and_extreme_gates_keep_parity(form):
    x = inputs([50], seed=3)
    x[3][5::7] = -200.0  # e^g is 0
    x[3][3::11] = -0.0
    x[4][2::5] = 0.0
    x[4][4::9] = 1.0
    x[2][10:20] = 1e-39  # subnormal in bf16
    x[4][12:18] = 1e-38
    x[0][22], x[1][23], x[2][24:26] = -0.0, -0.0, -0.0
    x[0][27], x[1][28] = 1e-39, 1e-39
    engine = engine_of(form, x, [50])
    engine.prefill({0: 3})
    engine.finish()
    base = one_shot(x, [50], form=form)
    same_bits(engine.o, base, "decode")
    assert bool(torch.isfinite(base).all())


def test_a_zero_query_and_values_of_negative_zero(form):
    """Accumulators start at +0.0: what is summed of signed zeros has one sign in every case."""
    x = inputs([20])
    x[0][:], x[2][:] = -0.0, -0.0
    engine = engine_of(form, x, [20])
    engine.prefill({0: 14})
    base = one_shot(x, [20], form=form)
    same_bits(engine.finish().o, base, "signed zeros")
    assert (base == 0).all()


def test_identical_keys_without_decay_keep_parity(form):
    x = inputs([40], seed=5)
    x[1][:] = x[1][:1].clone()
    x[3].zero_()
    x[4].fill_(1.0)
    engine, whole = (engine_of(form, x, [40]) for _ in range(2))
    engine.prefill({0: 14})
    whole.prefill({0: 40})
    same_bits(engine.finish().o, one_shot(x, [40], form=form), "identical keys")
    same_bits(whole.o, engine.o, "prefill")
    assert_same_state(engine.state(0), whole.state(0), "identical keys")


# Negative controls: one unit in the last place of one stored value must be seen.


def test_one_ulp_of_decay_is_seen_in_the_output(form):
    x = inputs([40])
    engine = engine_of(form, x, [40])
    engine.prefill({0: 25})
    engine.pool.gates[0, 0, 0] = nudge(engine.pool.gates[0, 0, 0], 8)
    engine.finish()
    base = one_shot(x, [40], form=form)
    assert bit_equal(engine.o[:25], base[:25]) and not bit_equal(engine.o, base)


def test_one_ulp_of_boundary_state_is_seen_in_the_state(form):
    x = inputs([40])
    x[3] *= 0.01  # a strong decay would forget the change, as it should
    engine, whole = (engine_of(form, x, [40]) for _ in range(2))
    whole.prefill({0: 40})
    engine.prefill({0: 25})
    pool = engine.pool
    S = gdn.join_planes(pool.high[0], pool.low[0])
    pool.high[0], pool.low[0] = gdn.split_planes(nudge(S, int(S.abs().argmax())))
    engine.finish()
    with pytest.raises(AssertionError, match=", S: "):
        assert_same_state(engine.state(0), whole.state(0), "damaged")


def test_a_plan_that_is_not_of_these_rows_or_this_pool_is_refused(form):
    x = inputs([20])
    pool = dirty_pool(3, kind=gdn.POOLS[form])

    def prefill(lengths, slots, chunk=16):
        getattr(gdn, f"{form}_prefill")(*x, gdn.Plan(lengths, chunk), pool, torch.tensor(slots, dtype=torch.int32))

    with pytest.raises(ContractError, match="the plan is of 10 rows, found 20"):
        one_shot(x, [10], form=form)
    with pytest.raises(ContractError, match="chunks of 32, the pool of 16"):
        prefill([20], [0], chunk=32)
    for slot in (-1, 3):
        with pytest.raises(ContractError, match=f"slot {slot}: expected one of the pool's 3"):
            prefill([20], [slot])
    with pytest.raises(ContractError, match="slot 1 is of 2 sequences"):
        prefill([10, 10], [1, 1])
    prefill([20, 0], [1, 1])  # a sequence of no tokens has no need of one
