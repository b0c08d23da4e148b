"""The rollout engine's process under audit: a generation that goes through every way of computing a logprob."""

from __future__ import annotations

import gc

from isoexec.verify.audit.recorder import Recorder
from isoexec.verify.audit.report import evidence
from isoexec.verify.engine_worker import EngineOperations
from isoexec.verify.protocol import serve

_NEW_TOKENS = 4


class EngineAudit(EngineOperations):
    """One engine at a time."""

    def audit(self, prompts, seeds) -> dict:
        """Sample at two temperatures, with logprobs of single tokens and of whole rows, sample greedily, score prompts; list stray ops.

        Args:
            prompts: token ids of each prompt.
            seeds: one for each.

        Returns:
            :func:`isoexec.verify.audit.report.evidence` of both cases.
        """
        from vllm import SamplingParams

        from isoexec.runtimes.vllm import step

        recorder = Recorder(step.current)
        greedy = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True, detokenize=False)
        scored = SamplingParams(temperature=1.0, seed=0, max_tokens=1, logprobs=2, prompt_logprobs=2, detokenize=False)
        drawn = SamplingParams(temperature=0.6, seed=0, max_tokens=_NEW_TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        with evidence(recorder) as found, recorder.observing():
            self._engine.generate(prompts, seeds, 1.0, _NEW_TOKENS)
            self._engine.generate(prompts, seeds, 0.7, _NEW_TOKENS, record_rows=True)
            self._engine.request([prompts[0], prompts[-1]], [greedy, drawn])
            self._engine.request([prompts[-1]], [greedy])
            self._engine.reset_prefix_cache()
            self._engine.request(prompts, [scored] * len(prompts))
        return found


def start() -> dict:
    """Import the runtime and return the operations."""
    from isoexec.runtimes.vllm.engine import RolloutEngine, prepare_environment

    prepare_environment()
    from vllm import LLM  # noqa: F401  (most of an engine's start-up; here it overlaps with the trainer's)

    gc.freeze()  # as in isoexec.verify.engine_worker
    operations = EngineAudit(RolloutEngine)
    return {name: getattr(operations, name) for name in ("open", "audit", "close")}


if __name__ == "__main__":
    raise SystemExit(serve(start))
