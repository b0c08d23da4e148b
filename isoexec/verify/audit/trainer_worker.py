"""The trainer's process under audit: scoring, forward with gradients, and recomputation. It also makes the small checkpoints."""

from __future__ import annotations

from isoexec.verify.audit.recorder import Recorder
from isoexec.verify.audit.report import evidence
from isoexec.verify.engine_worker import choose_contract
from isoexec.verify.protocol import serve

#: Case -> arguments of ``PolicyTrainer.logprobs``.
PASSES = {
    "trainer_score": {},
    "trainer_forward": {"grad": True},
    "trainer_recompute": {"grad": True, "recompute": True},
}
_TEMPERATURE = 0.7


class TrainerAudit:
    """One policy at a time."""

    def __init__(self, trainer_class):
        self._trainer_class = trainer_class
        self._trainer = None

    def open(self, model: str, contract: str, aux_loss: float) -> None:
        """Build the trainer on an HF-format folder; ``aux_loss``: coefficient of the router's load-balancing loss."""
        self.close()
        choose_contract(contract)
        self._trainer = self._trainer_class(model, aux_loss=aux_loss)

    def audit(self, sequences, packing) -> dict:
        """Compute the logprobs of (prompt, tokens) ``sequences`` in every case of a trainer; list stray ops.

        Args:
            sequences: (prompt tokens, generated tokens).
            packing: groups of sequences that share a micro-batch.

        Returns:
            :func:`isoexec.verify.audit.report.evidence` of the three cases.
        """
        running = ""
        recorder = Recorder(lambda: running)
        pairs = [(prompt, tokens) for prompt, tokens in sequences]
        with evidence(recorder) as found:
            for running, arguments in PASSES.items():  # noqa: B007 (the recorder reads it)
                for rows in (True, False):  # logprobs alone are computed without logits
                    with recorder.observing():
                        scores = self._trainer.logprobs(pairs, temperature=_TEMPERATURE, packing=packing, with_rows=rows, **arguments)
                        for score in scores:
                            recorder.expect_logprob(score.logprobs)
        return found

    def close(self) -> None:
        """Free the trainer."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None


def make_checkpoint(folder: str, architecture: str, sizes: dict) -> None:
    """A small random checkpoint in ``folder``."""
    from isoexec.verify import checkpoint

    checkpoint.make_checkpoint(folder, architecture, **sizes)


def start() -> dict:
    """Import the runtime and return the operations."""
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    operations = TrainerAudit(PolicyTrainer)
    return {"make_checkpoint": make_checkpoint} | {name: getattr(operations, name) for name in ("open", "audit", "close")}


if __name__ == "__main__":
    raise SystemExit(serve(start))
