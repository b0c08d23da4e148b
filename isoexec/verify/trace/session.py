"""``isoexec trace run``: start the two runtimes, trace one batch of prompts."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from isoexec.contract import ContractError, contract_for_model
from isoexec.verify.progress import Progress
from isoexec.verify.prompts import make_prompts, packings, request_seeds
from isoexec.verify.protocol import WorkerError, WorkerGroup, WorkerRefused
from isoexec.verify.run import BACKEND, check_backend, check_model, text_config, worker_environment
from isoexec.verify.settings import MAX_MODEL_LEN
from isoexec.verify.trace.bundle import Sequence
from isoexec.verify.trace.report import Report
from isoexec.verify.trace.run import Traced, trace

_PASSES = {"score": (False, False), "forward": (True, False), "recompute": (True, True)}


def run(options) -> tuple[Report | None, Path]:
    """Trace as the command line says; the report (None: a process died) and the bundle's file.

    Raises:
        ContractError: a model that cannot be traced, or numbers that make no batch.
    """
    for name, value in (("prompts", options.prompts), ("tokens", options.tokens)):
        if value < 1:
            raise ContractError(f"--{name} {value}: expected at least 1")
    if options.temperature <= 0:
        raise ContractError(f"--temperature {options.temperature}: expected more than 0: a greedy token is not drawn from a distribution")
    check_backend()
    out = Path(options.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    file = options.bundle or out / "trace.zip"
    with tempfile.TemporaryDirectory(prefix="isoexec-trace-") as work, WorkerGroup(out / "logs") as group:
        try:
            return _Session(options, Path(work), group).trace(file), file
        except WorkerRefused as error:
            raise ContractError(str(error)) from None
        except WorkerError as error:
            print(f"isoexec trace: {group.error or error}; nothing was concluded", file=sys.stderr)
            return None, file


class _Session:
    """Two workers on one batch."""

    def __init__(self, options, work: Path, group: WorkerGroup):
        self._options, self._progress = options, Progress()
        contract = work / "contract.json"
        model = Path(options.model).resolve() if options.model else work / options.architecture
        trainer_model = Path(options.trainer_model).resolve() if options.trainer_model else model
        for folder in (model, trainer_model):
            if folder.parent != work:
                check_model(folder)
        if not options.model:
            from isoexec.verify.checkpoint import make_checkpoint

            make_checkpoint(model, options.architecture)
        self._model, self._trainer_model = model, trainer_model
        contract.write_text(contract_for_model(model, BACKEND).to_json(), encoding="utf-8")
        self._engine, self._trainer = (
            group.start(name, f"isoexec.verify.{name}_worker", worker_environment(contract)) for name in ("engine", "trainer")
        )
        self._progress(f"two processes import their frameworks; logs: {options.out}/logs")
        shape = dict(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=MAX_MODEL_LEN)
        self._engine.call("open", options.timeout, model=str(model), contract=str(contract), shape=shape)
        self._trainer.call("open", options.timeout, model=str(trainer_model), contract=str(contract), learning_rate=1e-3)
        vocabulary = text_config(check_model(model))["vocab_size"]
        self._prompts = make_prompts(options.prompts, vocabulary, seed=20)
        self._seeds = request_seeds(self._prompts, seed=21)

    def trace(self, file: Path) -> Report:
        """Run, record, compare."""
        options = self._options
        about = {
            "model": self._model.name,
            "trainer model": self._trainer_model.name,
            "temperature": repr(options.temperature),
            "trainer pass": options.scoring,
        }
        return trace(Traced(self._sample, self._score), self._sequences, file, about, level=options.level)

    def _sample(self, recording: dict) -> None:
        self._rollouts = self._engine.call(
            "generate", self._options.timeout, prompts=self._prompts, seeds=self._seeds, temperature=self._options.temperature,
            max_tokens=self._options.tokens, one_at_a_time=False, rows=False, trace=recording,
        )["rollouts"]  # fmt: skip
        self._progress(f"engine: {sum(len(r['tokens']) for r in self._rollouts)} tokens sampled and recorded")

    def _score(self, recording: dict) -> None:
        pairs = [[prompt, rollout["tokens"]] for prompt, rollout in zip(self._prompts, self._rollouts)]
        grad, recompute = _PASSES[self._options.scoring]
        temperature = self._options.trainer_temperature or self._options.temperature
        packing = packings([len(p) + len(t) for p, t in pairs], tokens=1024, seed=1)
        self._scores = self._trainer.call(
            "score", self._options.timeout, sequences=pairs, temperature=temperature, packing=packing, grad=grad, recompute=recompute,
            rows=False, trace=recording,
        )  # fmt: skip
        self._progress("trainer: scored and recorded")

    def _sequences(self) -> dict[int, Sequence]:
        return {
            number: Sequence(prompt + r["tokens"], len(prompt), {"engine": r["logprobs"], "trainer": s["logprobs"]})
            for number, (prompt, r, s) in enumerate(zip(self._prompts, self._rollouts, self._scores))
        }
