"""What the comparisons prove: the exit status and the lines that explain it."""

from __future__ import annotations

from dataclasses import dataclass, field

from isoexec.verify.accuracy import ACCURACY_BOUND, LEAST_TOKENS, Accuracy
from isoexec.verify.arm import ModelUnderTest, Sample
from isoexec.verify.compare import Comparison, disagreements
from isoexec.verify.settings import EVIDENCE

EQUAL, DIFFERENT, BAD_INPUT, INCONCLUSIVE = 0, 1, 2, 3


@dataclass
class Verdict:
    """Lines of each kind; the exit status follows from them."""

    differences: list[str] = field(default_factory=list)
    inconclusive: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """A difference is conclusive, so it wins over an unproven setting."""
        if self.differences:
            return DIFFERENT
        return INCONCLUSIVE if self.inconclusive else EQUAL

    def lines(self) -> list[str]:
        """What to print, the worst first."""
        kinds = (("DIFFERENT", self.differences), ("INCONCLUSIVE", self.inconclusive), ("warning", self.warnings))
        return [f"{kind}: {text}" for kind, texts in kinds for text in texts]

    def judge_model(
        self,
        model: ModelUnderTest,
        comparisons: list[Comparison],
        samples: dict[str, list[Sample]],
        errors: Accuracy | None,
        control: Comparison,
    ) -> None:
        """Judge one model.

        Args:
            model: that was run.
            comparisons: of both arms.
            samples: by arm.
            errors: of isoexec and native against the reference, or None where there is no native trainer to compare with.
            control: of the isoexec engine with a trainer whose weights are off by one ulp; it must differ.
        """
        name = model.name
        for c in comparisons:
            if c.arm == "isoexec":
                self._judge_isoexec(c)
        if control.bit_equal == 1 or control.rows_equal == 1:
            self.inconclusive.append(f"{name}: a planted ulp in one weight went unseen; the comparison is blind")
        native = [c for c in comparisons if c.arm == "native" and not c.not_run]
        if native and all(c.bit_equal == 1 for c in native):
            self.warnings.append(f"{name}: every native token is equal too; the comparison may be blind")
        for arm, arm_samples in samples.items():
            self._judge_evidence(name, arm, arm_samples)
        for line in disagreements(_by_request(samples.get("isoexec", []))):
            self.differences.append(f"{name}: isoexec: {line}")
        if errors is not None and not errors.enough:
            line = (
                f"{name}: mean |logprob - HF fp32| of isoexec is {errors.isoexec:.3e}, more than {ACCURACY_BOUND} times the native trainer's "
                f"{errors.native:.3e} on the same {errors.tokens} tokens"
            )
            if errors.judged:
                self.differences.append(line)
            else:
                self.warnings.append(f"{line}; not judged, which takes {LEAST_TOKENS}")

    def _judge_isoexec(self, c: Comparison) -> None:
        if not c.finite:
            self.differences.append(f"{c.model}: {c.setting}: a logprob is not finite")
        elif c.bit_equal < 1:
            self.differences.append(
                f"{c.model}: {c.setting}: {c.tokens - c.equal_tokens} of {c.tokens} tokens differ, at most by {c.statistics()['max_abs']:.3e} nats"
            )
        elif c.equal_rows is None:
            self.inconclusive.append(f"{c.model}: {c.setting}: full-vocabulary rows were not compared")
        elif c.rows_equal < 1:
            self.differences.append(f"{c.model}: {c.setting}: {c.tokens - c.equal_rows} of {c.tokens} full-vocabulary rows differ")

    def _judge_evidence(self, name: str, arm: str, samples: list[Sample]) -> None:
        for sample in samples:
            for key in sample.setting.evidence:
                if sample.evidence.get(key):
                    continue
                line = f"{name}: {arm}: {sample.setting.name}: {EVIDENCE[key]}"
                block, longest = sample.evidence["block_tokens"], max(map(len, sample.prompts))
                if key == "cached_tokens" and block >= longest:  # of a hybrid whose block holds a state
                    self.warnings.append(f"{line}: a block is {block} tokens, the longest prompt {longest}; this model does not show what a hit does")
                else:
                    self.inconclusive.append(line)


def add_changed_logprobs(samples: list[Sample]) -> None:
    """Count, for every sample at the second weights, first tokens whose logprob differs from the same request's at the first weights."""
    first = {}
    for s in samples:
        for prompt, seed, scored in zip(s.prompts, s.seeds, s.engine):
            request = (s.setting.temperature, tuple(prompt), seed)
            if s.weights == "first":
                first[request] = scored.logprobs[0]
    for s in samples:
        if s.weights != "first":
            requests = [(s.setting.temperature, tuple(p), seed) for p, seed in zip(s.prompts, s.seeds)]
            s.evidence["changed_logprobs"] = sum(
                first.get(request, scored.logprobs[0]) != scored.logprobs[0] for request, scored in zip(requests, s.engine)
            )


def _by_request(samples: list[Sample]) -> dict:
    requests: dict[tuple, list] = {}
    for s in samples:
        for prompt, seed, tokens, scored in zip(s.prompts, s.seeds, s.tokens, s.engine):
            key = (s.weights, s.setting.temperature, tuple(prompt), seed)
            requests.setdefault(key, []).append((s.setting.name, tokens, scored.logprobs))
    return requests
