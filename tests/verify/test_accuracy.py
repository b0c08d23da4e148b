"""Errors against the reference are paired: the same tokens, each request once."""

import pytest

from isoexec.verify.accuracy import LEAST_TOKENS, Accuracy, accuracy, measure, rollouts
from isoexec.verify.arm import Sample
from isoexec.verify.compare import Scored
from isoexec.verify.protocol import to_bits
from isoexec.verify.settings import WHOLE, Setting


def sample(tokens: list[list[int]], values: list[list[float]], *, weights="first", temperature=1.0) -> Sample:
    prompts = [[index + 5] for index in range(len(tokens))]
    engine = [Scored(to_bits(v)) for v in values]
    return Sample(Setting("s", temperature=temperature), WHOLE, weights, prompts, [7] * len(tokens), tokens, engine, {})


def test_errors_are_means_over_the_same_tokens():
    truth = to_bits([-1.0, -2.0])
    assert accuracy(to_bits([-1.5, -2.0]), to_bits([-1.0, -2.25]), truth) == Accuracy(2, isoexec=0.25, native=0.125)
    with pytest.raises(ValueError):
        accuracy([], [], [])
    with pytest.raises(ValueError):
        accuracy(truth, truth, truth[:1])


def test_bound():
    assert Accuracy(9, 1.1e-2, 1.0001e-2).enough and not Accuracy(9, 1.11e-2, 1e-2).enough
    nan = float("nan")
    assert not any(Accuracy(9, *errors).enough for errors in ((nan, 1e-2), (1e-2, nan), (float("inf"), float("inf"))))


def test_few_tokens_are_not_judged_unless_an_error_is_not_finite():
    assert Accuracy(LEAST_TOKENS, 2e-2, 1e-2).judged and not Accuracy(LEAST_TOKENS - 1, 2e-2, 1e-2).judged
    assert Accuracy(9, float("nan"), 1e-2).judged and Accuracy(9, 1e-2, float("inf")).judged


def test_a_request_counts_once_at_its_longest():
    short, long = sample([[1], [2]], [[-1.0], [-2.0]]), sample([[1, 3]], [[-1.0, -0.5]])
    other = sample([[1]], [[-4.0]], temperature=0.7)
    groups = rollouts([short, long, other])
    assert {key: [r[1] for r in group] for key, group in groups.items()} == {("first", 1.0): [[1, 3], [2]], ("first", 0.7): [[1]]}


def test_both_scorers_get_the_tokens_of_isoexec():
    asked = []

    def scorer(shift):
        def score(weights, sequences, temperature):
            asked.append((weights, temperature, [tokens for _, tokens in sequences]))
            return [to_bits([-1.0 - shift] * len(tokens)) for _, tokens in sequences]

        return score

    samples = [sample([[1, 2]], [[-1.0, -1.5]]), sample([[4]], [[-1.0]], weights="second", temperature=0.7)]
    assert measure(samples, scorer(0.0), scorer(0.25)) == Accuracy(3, isoexec=0.5 / 3, native=0.25)
    assert asked == 2 * [("first", 1.0, [[1, 2]])] + 2 * [("second", 0.7, [[4]])]
    with pytest.raises(ValueError):
        measure(samples, scorer(0.0), lambda *_: [to_bits([-1.0])])
