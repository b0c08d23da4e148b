"""Compare what the engine said about its tokens with what the trainer recomputes. Equality is over bit patterns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from isoexec.verify.protocol import from_bits


@dataclass(frozen=True)
class Scored:
    """Logprobs of one sequence's generated tokens as fp32 bit patterns, with digests of the rows they came from or None."""

    logprobs: list[int]
    rows: list[str] | None = None


@dataclass
class Comparison:
    """One line of the report.

    Attributes:
        model: name of the checkpoint.
        arm: ``"native"`` or ``"isoexec"``.
        setting: sampling and scoring.
        differences: engine minus trainer for each token, in nats; exact fp64 differences of fp32 values.
        equal_tokens: tokens whose two logprobs have the same bits.
        equal_rows: positions whose full-vocabulary rows have the same digest, or None where not compared.
        finite: every logprob on both sides is a finite number.
        not_run: why the setting was not run and there is nothing to compare, or "".
    """

    model: str
    arm: str
    setting: str
    differences: list[float] = field(repr=False)
    equal_tokens: int
    equal_rows: int | None
    finite: bool
    not_run: str = ""

    @property
    def tokens(self) -> int:
        return len(self.differences)

    @property
    def bit_equal(self) -> float | None:
        """Share of tokens with equal bits; None where nothing was run."""
        return self.equal_tokens / self.tokens if self.tokens else None

    @property
    def rows_equal(self) -> float | None:
        """Share of positions with equal full-vocabulary rows, or None."""
        return None if self.equal_rows is None or not self.tokens else self.equal_rows / self.tokens

    @property
    def passed(self) -> bool:
        """Every token and every row has equal bits, rows were compared, and all numbers are finite."""
        return self.finite and 0 < self.tokens == self.equal_tokens == self.equal_rows

    def statistics(self) -> dict:
        """``mean_abs``, ``max_abs`` and ``std_abs`` of the absolute difference in nats; null where a side is not finite."""
        if not self.finite:
            return {"mean_abs": None, "max_abs": None, "std_abs": None}
        sizes = [abs(d) for d in self.differences]
        mean = math.fsum(sizes) / len(sizes)
        variance = math.fsum((s - mean) ** 2 for s in sizes) / len(sizes)
        return {"mean_abs": mean, "max_abs": max(sizes), "std_abs": math.sqrt(variance)}

    def as_run(self) -> dict:
        """The entry of ``verify.json``."""
        return {
            "model": self.model,
            "arm": self.arm,
            "setting": self.setting,
            "tokens": self.tokens,
            **self.statistics(),
            "bit_equal": self.bit_equal,
            "rows_equal": self.rows_equal,
            **({"not_run": self.not_run} if self.not_run else {}),
        }


def not_run(model: str, arm: str, setting: str, why: str) -> Comparison:
    """The line of a setting that an arm could not run."""
    return Comparison(model, arm, setting, differences=[], equal_tokens=0, equal_rows=None, finite=False, not_run=why)


def compare(model: str, arm: str, setting: str, engine: list[Scored], trainer: list[Scored]) -> Comparison:
    """Compare two sides, sequence by sequence.

    Raises:
        ValueError: the sides hold other numbers of sequences or tokens, or none; nothing may be left out of the comparison.
    """
    if len(engine) != len(trainer):
        raise ValueError(f"{arm}, {setting}: {len(engine)} sequences from the engine, {len(trainer)} from the trainer")
    ours, theirs, equal_rows = [], [], 0
    for index, (a, b) in enumerate(zip(engine, trainer)):
        counts = {len(side.logprobs) for side in (a, b)} | {len(side.rows) for side in (a, b) if side.rows is not None}
        if len(counts) != 1 or counts == {0}:
            raise ValueError(f"{arm}, {setting}, sequence {index}: token counts {sorted(counts)} on the two sides")
        ours += a.logprobs
        theirs += b.logprobs
        if a.rows is None or b.rows is None:
            equal_rows = None
        elif equal_rows is not None:
            equal_rows += sum(x == y for x, y in zip(a.rows, b.rows))
    if not ours:
        raise ValueError(f"{arm}, {setting}: no tokens")
    values = list(zip(from_bits(ours), from_bits(theirs)))
    return Comparison(
        model=model,
        arm=arm,
        setting=setting,
        differences=[a - b for a, b in values],
        equal_tokens=sum(a == b for a, b in zip(ours, theirs)),
        equal_rows=equal_rows,
        finite=all(math.isfinite(x) for pair in values for x in pair),
    )


def disagreements(rollouts: dict[tuple, list[tuple[str, list[int], list[int]]]]) -> list[str]:
    """Requests that gave other tokens or other logprob bits in another setting of the same engine.

    Args:
        rollouts: (weights, temperature, prompt, seed) -> (setting, tokens, logprob bits) of each time it was sampled. A shorter
            continuation must be the start of a longer one.

    Returns:
        One line for each request that disagrees.
    """
    lines = []
    for (weights, temperature, prompt, _), samples in rollouts.items():
        first_setting, tokens, logprobs = max(samples, key=lambda s: len(s[1]))
        for setting, other_tokens, other_logprobs in samples:
            n = len(other_tokens)
            if other_tokens != tokens[:n] or other_logprobs != logprobs[:n]:
                at = next(i for i in range(n) if (other_tokens[i], other_logprobs[i]) != (tokens[i], logprobs[i]))
                lines.append(
                    f"prompt of {len(prompt)} tokens, T={temperature}, weights {weights}: "
                    f"{setting!r} leaves {first_setting!r} at new token {at}"
                )
                break
    return lines
