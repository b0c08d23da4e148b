"""The form `cpr` on the CPU, over bit patterns before the rounding and over state; test_forms_cpu.py has what holds for both forms."""

import pytest

from isoexec.ops._core.bits import bit_equal, nudge
from tests.gdn.cases import assert_same_state, engine_of, inputs, one_shot, recurrence, relative
from tests.ops.op_checks import same_bits


@pytest.mark.parametrize("chunk", [16, 64])
def test_single_steps_equal_one_shot(chunk):
    """Ragged lanes, from the first token on; the longest joins at position 220."""
    lengths = [1, 15, 16, 17, 31, 63, 64, 65, 127, 129, 300] if chunk == 16 else [63, 64, 65, 300]
    x = inputs(lengths)
    steps, whole = (engine_of("cpr", x, lengths, chunk=chunk) for _ in range(2))
    steps.prefill({len(lengths) - 1: 220})
    steps.finish()
    whole.prefill(dict(enumerate(lengths)))
    same_bits(steps.o, one_shot(x, lengths, chunk, "cpr"), "decode against trainer")
    same_bits(whole.o, steps.o, "prefill against decode")
    for n in range(len(lengths)):
        assert_same_state(steps.state(n), whole.state(n), "decode against prefill")


@pytest.mark.parametrize("chunk", [16, 64])
def test_any_split_of_a_ragged_batch(chunk):
    lengths = [37, 1, 64, 20, 33]
    x = inputs(lengths, seed=chunk)
    split, whole = (engine_of("cpr", x, lengths, slots, chunk) for slots in ([0, 2, 7, 4, 1], [5, 1, 2, 3, 0]))
    split.random_run(chunk)
    whole.prefill(dict(enumerate(lengths)))
    same_bits(split.o, one_shot(x, lengths, chunk, "cpr"), "split")
    for n in range(len(lengths)):
        assert_same_state(split.state(n), whole.state(n), f"sequence {n}")


@pytest.mark.parametrize("chunk", [16, 64])
def test_is_the_delta_rule(chunk):
    x = inputs([150, 40], H=2, HV=4)
    expected, _ = recurrence(*x, [150, 40])
    got, chunked = (one_shot(x, [150, 40], chunk, form) for form in ("cpr", "cpr_wy"))
    assert relative(got, expected) < 0.01
    assert not bit_equal(got, chunked) and relative(got, expected) <= relative(chunked, expected)


def test_one_ulp_of_the_running_state_shows():
    x = inputs([24])
    run = [engine_of("cpr", x, [24]) for _ in range(2)]
    for e in run:
        e.prefill({0: 20})
    run[1].pool.now[0] = nudge(run[1].pool.now[0], index=int(run[1].pool.now[0].abs().argmax()))
    for e in run:
        e.finish()
    same_bits(run[0].o, one_shot(x, [24], form="cpr"), "resumed")
    assert not bit_equal(run[1].o[20:], run[0].o[20:])


def test_resynchronised_at_the_boundary():
    """After a chunk fills, the running state is not read: poison in it changes nothing."""
    x = inputs([40])
    e = engine_of("cpr", x, [40])
    e.prefill({0: 32})
    e.pool.now.fill_(float("nan"))
    same_bits(e.finish().o, one_shot(x, [40], form="cpr"), "after the boundary")
