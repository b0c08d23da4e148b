"""The rollout engine's process: samples prompts and reports each sampled token's logprob and the digest of its row."""

from __future__ import annotations

import gc
import os

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.ops._core import registry
from isoexec.verify.protocol import serve, to_bits
from isoexec.verify.trace.worker import recording


class EngineOperations:
    """One engine at a time; a new shape closes the one before."""

    def __init__(self, engine_class):
        self._engine_class = engine_class
        self._engine = None

    def open(self, model: str, contract: str | None, shape: dict) -> None:
        """Build the engine of ``shape`` (keyword arguments of ``RolloutEngine``) on an HF-format folder."""
        self.close()
        choose_contract(contract)
        self._budget = shape["max_num_batched_tokens"]
        self._engine = self._engine_class(model, **shape, **_ranks())

    def generate(
        self, prompts, seeds, temperature: float, max_tokens: int, one_at_a_time: bool, rows: bool, evict_at=(), trace: dict | None = None
    ) -> dict:
        """Sample every prompt. Logprobs are fp32 bit patterns; ``rows`` adds digests of whole rows; ``evidence`` counts what happened;
        ``trace`` records the ops (:func:`isoexec.verify.trace.worker.recording`)."""
        before, replays = self._engine.num_preemptions, self._engine.num_replays
        batches = [([p], [s]) for p, s in zip(prompts, seeds)] if one_at_a_time else [(prompts, seeds)]
        rollouts = []
        with recording(trace, "engine", lambda: self._engine.weight_manifest()):
            for batch_prompts, batch_seeds in batches:
                rollouts += self._engine.generate(batch_prompts, batch_seeds, temperature, max_tokens, rows, evict_at)
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            if list(rollout.prompt) != prompt:
                raise ValueError(f"the engine returned another prompt ({len(rollout.prompt)} tokens) than was sent ({len(prompt)})")
        return {
            "rollouts": [
                {
                    "tokens": list(r.tokens),
                    "logprobs": to_bits(r.logprobs),
                    "rows": None if r.row_digests is None else list(r.row_digests),
                }
                for r in rollouts
            ],
            "evidence": {
                "block_tokens": self._engine.block_size,
                "replays": self._engine.num_replays - replays,
                "preemptions": self._engine.num_preemptions - before,
                "cached_tokens": sum(r.num_cached_tokens for r in rollouts),
                # vLLM's scheduler asserts that no step exceeds the budget.
                "chunked_prompts": sum(len(r.prompt) - r.num_cached_tokens > self._budget for r in rollouts),
            },
        }

    def sync(self, weights: str) -> None:
        """Load new weights in place, as after an optimizer step."""
        self._engine.load_weights(weights)

    def identity(self) -> str:
        """What this process runs, as evidence: canonical JSON of its identity."""
        return self._engine.identity().to_json()

    def weights(self) -> dict:
        """Manifest of the weights that the engine holds now."""
        return self._engine.weight_manifest().data()

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _ranks() -> dict[str, int]:
    """The engine's argument where this process is one of several ranks."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    return {"tensor_parallel": count} if count > 1 else {}


def choose_contract(path: str | None) -> None:
    """Name the contract that the next model of this process is built under."""
    if path is None:
        os.environ.pop(CONTRACT_VARIABLE, None)
    else:
        os.environ[CONTRACT_VARIABLE] = path


def served() -> list[list]:
    """[op, case, implementation, calls so far] of this process."""
    return [[*key, calls] for key, calls in registry.served().items()]


def start() -> dict:
    """Import the runtime and return the operations."""
    from isoexec.runtimes.vllm.engine import RolloutEngine, prepare_environment

    prepare_environment()
    from vllm import LLM  # noqa: F401  (most of an engine's start-up; here it overlaps with the other processes')

    gc.freeze()  # engines collect garbage on opening and closing; without this each time walks every imported module
    operations = EngineOperations(RolloutEngine)
    names = ("open", "generate", "sync", "identity", "weights", "close")
    return {name: getattr(operations, name) for name in names} | {"served": served}


if __name__ == "__main__":
    raise SystemExit(serve(start))
