"""The comparison, on numbers worked out by hand."""

import math

import pytest

from isoexec.verify.compare import Scored, compare, disagreements
from isoexec.verify.protocol import to_bits

ENGINE = [Scored(to_bits([-1.0, -2.0]), ["a", "b"]), Scored(to_bits([-0.5, -4.0]), ["c", "d"])]


def scored(*values, rows=None):
    return Scored(to_bits(list(values)), rows)


def test_equal_sides():
    c = compare("m", "isoexec", "s", ENGINE, ENGINE)
    assert c.passed
    assert c.as_run() == {
        "model": "m", "arm": "isoexec", "setting": "s", "tokens": 4,
        "mean_abs": 0.0, "max_abs": 0.0, "std_abs": 0.0, "bit_equal": 1.0, "rows_equal": 1.0,
    }  # fmt: skip


def test_statistics_of_known_differences():
    trainer = [scored(-1.0, -1.5, rows=["a", "x"]), scored(-0.5, -2.5, rows=["c", "x"])]
    c = compare("m", "native", "s", ENGINE, trainer)
    run = c.as_run()  # |d| = 0, 0.5, 0, 1.5
    assert (run["mean_abs"], run["max_abs"]) == (0.5, 1.5)
    assert run["std_abs"] == pytest.approx(math.sqrt((0.25 + 0 + 0.25 + 1) / 4), abs=1e-15)
    assert (run["bit_equal"], run["rows_equal"], c.passed) == (0.5, 0.5, False)


def test_one_ulp_in_one_token_is_seen():
    logprobs = list(ENGINE[1].logprobs)
    logprobs[1] += 1
    c = compare("m", "isoexec", "s", ENGINE, [ENGINE[0], Scored(logprobs, ENGINE[1].rows)])
    assert (c.equal_tokens, c.passed) == (3, False)
    assert c.statistics()["max_abs"] == 2.0**-21


def test_signed_zero_and_rows_count():
    c = compare("m", "isoexec", "s", [scored(0.0, rows=["a"])], [scored(-0.0, rows=["a"])])
    assert (c.statistics()["max_abs"], c.bit_equal, c.passed) == (0.0, 0.0, False)
    c = compare("m", "isoexec", "s", [scored(-1.0, rows=["a"])], [scored(-1.0, rows=["b"])])
    assert (c.bit_equal, c.rows_equal, c.passed) == (1.0, 0.0, False)


def test_equal_nan_is_no_pass():
    side = [scored(float("nan"), rows=["a"])]
    c = compare("m", "isoexec", "s", side, side)
    assert (c.bit_equal, c.finite, c.passed) == (1.0, False, False)
    assert c.as_run()["max_abs"] is None


def test_rows_of_one_side_only_are_not_compared():
    c = compare("m", "native", "s", ENGINE, [Scored(s.logprobs) for s in ENGINE])
    assert (c.as_run()["rows_equal"], c.passed) == (None, False)


@pytest.mark.parametrize(
    "trainer",
    [ENGINE[:1], [ENGINE[0], scored(-0.5)], [ENGINE[0], Scored(ENGINE[1].logprobs, ["c"])], [ENGINE[0], scored()]],
)
def test_nothing_may_be_left_out(trainer):
    with pytest.raises(ValueError, match="isoexec, s"):
        compare("m", "isoexec", "s", ENGINE, trainer)


def test_no_tokens_is_no_pass():
    with pytest.raises(ValueError, match="no tokens"):
        compare("m", "isoexec", "s", [], [])


def test_settings_of_one_engine_must_agree():
    key = ("first", 1.0, (5, 6), 7)
    whole = ("together", [1, 2, 3], [10, 20, 30])
    assert disagreements({key: [whole, ("solo", [1, 2], [10, 20])]}) == []
    [line] = disagreements({key: [whole, ("solo", [1, 2], [10, 21])]})
    assert "'solo' leaves 'together' at new token 1" in line
    [line] = disagreements({key: [("solo", [9], [10]), whole]})
    assert "at new token 0" in line
