"""Correct, not only consistent: the errors of both arms against HF transformers in fp32, on the very same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from isoexec.verify.arm import Sample
from isoexec.verify.protocol import from_bits

#: How much larger than the native trainer's error isoexec's may be.
ACCURACY_BOUND = 1.1
#: Fewer tokens are not judged: on a router's near ties the errors are heavy-tailed, and the ratio of two arms moves by a fifth over 500 tokens.
LEAST_TOKENS = 2000

#: (weights, sequences as [prompt, generated tokens], temperature) -> fp32 bit patterns of the generated tokens' logprobs, by sequence.
Score = Callable[[str, list[list[list[int]]], float], list[list[int]]]


@dataclass(frozen=True)
class Accuracy:
    """Mean |logprob - reference| in nats over ``tokens`` tokens that isoexec generated.

    The native arm is measured by its trainer, which can score any tokens. Its engine samples others, and their error is another number:
    where a router picks another expert on a last bit, the errors over two sets of 4,000 tokens differ by a fifth.
    """

    tokens: int
    isoexec: float
    native: float

    @property
    def judged(self) -> bool:
        """Whether the errors say something: over :data:`LEAST_TOKENS` or more, or because one is not finite."""
        return self.tokens >= LEAST_TOKENS or not math.isfinite(self.isoexec + self.native)

    @property
    def enough(self) -> bool:
        """Whether isoexec is within :data:`ACCURACY_BOUND` of native. A number that is not finite never is."""
        return math.isfinite(self.isoexec) and self.isoexec <= ACCURACY_BOUND * self.native


def rollouts(samples: list[Sample]) -> dict[tuple[str, float], list[tuple[list[int], list[int], list[int]]]]:
    """Every request once: (weights, temperature) -> (prompt, tokens, the engine's logprob bits), the longest that any setting sampled."""
    longest: dict[tuple, tuple] = {}
    for s in samples:
        for prompt, seed, tokens, scored in zip(s.prompts, s.seeds, s.tokens, s.engine, strict=True):
            request = (s.weights, s.setting.temperature, tuple(prompt), seed)
            if request not in longest or len(tokens) > len(longest[request][1]):
                longest[request] = (prompt, tokens, scored.logprobs)
    groups: dict[tuple[str, float], list] = {}
    for (weights, temperature, *_), rollout in longest.items():
        groups.setdefault((weights, temperature), []).append(rollout)
    return groups


def measure(samples: list[Sample], reference: Score, native: Score) -> Accuracy:
    """Score everything that isoexec sampled by the reference and by the native trainer.

    Args:
        samples: of the isoexec arm; its engine's logprobs are taken, which the comparison has shown to be its trainer's.
        reference: scores in fp32.
        native: scores as the native trainer does.

    Raises:
        ValueError: a scorer gave another number of logprobs than there are tokens, or there are none.
    """
    sides: tuple[list[int], list[int], list[int]] = ([], [], [])
    for (weights, temperature), group in rollouts(samples).items():
        sequences = [[prompt, tokens] for prompt, tokens, _ in group]
        scores = ([bits for _, _, bits in group], native(weights, sequences, temperature), reference(weights, sequences, temperature))
        for side, score in zip(sides, scores):
            side += [bits for sequence in score for bits in sequence]
    return accuracy(*sides)


def accuracy(isoexec: list[int], native: list[int], reference: list[int]) -> Accuracy:
    """Errors of both arms; all three are flat lists of fp32 bit patterns of the same tokens' logprobs.

    Raises:
        ValueError: the lists differ in length or are empty.
    """
    if not len(isoexec) == len(native) == len(reference) or not reference:
        raise ValueError(f"{len(isoexec)}, {len(native)} and {len(reference)} logprobs; expected the same number, not zero")
    truth = from_bits(reference)

    def error(side: list[int]) -> float:
        return math.fsum(abs(a - b) for a, b in zip(from_bits(side), truth)) / len(truth)

    return Accuracy(len(truth), error(isoexec), error(native))
