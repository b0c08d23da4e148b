"""Workers for tests of the orchestration: they answer at once, from a formula. No claim about the runtimes rests on them."""

import zlib
from array import array
from pathlib import Path

from isoexec.contract import ExecutionContract, Identity
from isoexec.contract.architectures import regions
from isoexec.verify.protocol import to_bits


def logprob(weights: str, temperature: float, context: tuple[int, ...]) -> float:
    """A dyadic fraction in (-4, -1), so exact in fp32."""
    return -1 - zlib.crc32(array("q", (weights == "first", int(temperature * 10), *context)).tobytes()) % 2**16 / 2**15


class FakeWorker:
    """Shares ``call`` with :class:`isoexec.verify.protocol.Worker`."""

    def __init__(self, **behaviour):
        self.behaviour, self.calls, self.weights = behaviour, [], "first"

    def call(self, operation: str, timeout: float, **arguments):
        self.calls.append((operation, arguments))
        return getattr(self, "weights_manifest" if operation == "weights" else operation)(**arguments)

    def open(self, model, contract=None, **_):
        self.weights = "planted" if model.endswith("planted") else "first"
        self.contract = contract

    def identity(self):
        parts = ExecutionContract.from_json(Path(self.contract).read_text()).parts()
        policy = {"contract": parts["numerical_policy"], **self.behaviour.get("policy", {})}
        return Identity("fake", parts["semantic"], policy, parts["deployment"]).to_json()

    def weights_manifest(self):
        digest = f"0x{zlib.crc32(self.behaviour.get('holds', self.weights).encode()):016x}"
        return {"w": {"shape": [1], "dtype": "bfloat16", "digest": digest, "elements": 1}}

    def served(self):
        """Every op of the dense model in each of the worker's cases, as often as it was called."""
        calls = sum(name in ("generate", "score") for name, _ in self.calls)
        ops = [(op, case) for region in regions("Qwen3ForCausalLM", "cpr_wy") for case in self.CASES for op in region.must_serve(case)]
        return [[op, case, "formula", calls] for op, case in ops if op not in self.behaviour.get("unserved", ())]


class FakeEngine(FakeWorker):
    """``shift(prompt, temperature)`` added to a logprob; ``evidence`` reported."""

    CASES = ("engine_prefill", "engine_decode")

    def generate(self, prompts, seeds, temperature, max_tokens, one_at_a_time, rows, evict_at):
        return {
            "rollouts": [self._rollout(p, s, temperature, max_tokens) for p, s in zip(prompts, seeds, strict=True)],
            "evidence": self.behaviour.get("evidence", {"block_tokens": 32, "preemptions": 3, "cached_tokens": 5, "chunked_prompts": 2}),
        }

    def sync(self, weights):
        assert Path(weights, "config.json").exists()
        self.weights = "second"

    def _rollout(self, prompt, seed, temperature, max_tokens):
        tokens = [(seed + i) % 97 for i in range(max_tokens)]
        logprobs = [logprob(self.weights, temperature, (*prompt, *tokens[: i + 1])) for i in range(max_tokens)]
        logprobs[-1] += self.behaviour.get("shift", lambda *_: 0.0)(prompt, temperature)
        return {"tokens": tokens, "logprobs": to_bits(logprobs), "rows": [f"{b:x}" for b in to_bits(logprobs)]}


class FakeTrainer(FakeWorker):
    """Scores by the engine's formula; ``stale`` keeps the first weights after a step."""

    CASES = ("trainer_forward", "trainer_recompute", "trainer_score")

    def score(self, sequences, temperature, packing, grad, recompute, rows):
        assert sorted(i for pack in packing for i in pack) == list(range(len(sequences)))
        scores = []
        for prompt, tokens in sequences:
            bits = to_bits([logprob(self.weights, temperature, (*prompt, *tokens[: i + 1])) for i in range(len(tokens))])
            scores.append({"logprobs": bits, "rows": [f"{b:x}" for b in bits] if rows and self.behaviour.get("rows", True) else None})
        return scores

    def step(self, sequences, temperature, packing, weights):
        self.weights = "first" if self.behaviour.get("stale") else "second"
        return {"loss": 1.0, "grad_norm": 1.0}
