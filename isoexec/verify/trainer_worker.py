"""The trainer's process: recomputes logprobs of sampled tokens, takes an optimizer step and exports the weights."""

from __future__ import annotations

from isoexec.verify.engine_worker import choose_contract, served
from isoexec.verify.protocol import serve, to_bits
from isoexec.verify.trace.worker import recording


class TrainerOperations:
    """One policy at a time."""

    def __init__(self, trainer_class):
        self._trainer_class = trainer_class
        self._trainer = None

    def open(self, model: str, contract: str | None, learning_rate: float) -> None:
        """Build the trainer on an HF-format folder."""
        self.close()
        choose_contract(contract)
        self._trainer = self._trainer_class(model, lr=learning_rate)

    def score(
        self, sequences, temperature: float, packing, grad: bool, recompute: bool, rows: bool, trace: dict | None = None
    ) -> list[dict]:
        """Logprobs (fp32 bit patterns) and row digests of the generated tokens of (prompt, tokens) ``sequences``, in their order; ``trace``
        records the ops (:func:`isoexec.verify.trace.worker.recording`)."""
        with recording(trace, "trainer", lambda: self._trainer.weight_manifest()):
            scores = self._trainer.logprobs(
                [(prompt, tokens) for prompt, tokens in sequences],
                temperature=temperature,
                packing=packing,
                grad=grad,
                recompute=recompute,
                with_rows=rows,
            )
        return [{"logprobs": to_bits(s.logprobs.tolist()), "rows": s.row_digests} for s in scores]

    def step(self, sequences, temperature: float, packing, weights: str) -> dict:
        """One optimizer step on ``sequences``, then export to the folder ``weights``. Returns loss and gradient norm."""
        result = self._trainer.train_step([(p, t) for p, t in sequences], None, temperature, packing=packing)
        self._trainer.export_hf(weights)
        return {key: float(result[key]) for key in ("loss", "grad_norm")}

    def identity(self) -> str:
        """What this process runs, as evidence: canonical JSON of its identity."""
        return self._trainer.identity().to_json()

    def weights(self) -> dict:
        """Manifest of the weights that the trainer holds now."""
        return self._trainer.weight_manifest().data()

    def close(self) -> None:
        """Free the trainer."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


def start() -> dict:
    """Import the runtime and return the operations."""
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    operations = TrainerOperations(PolicyTrainer)
    names = ("open", "score", "step", "identity", "weights", "close")
    return {name: getattr(operations, name) for name in names} | {"served": served}


if __name__ == "__main__":
    raise SystemExit(serve(start))
