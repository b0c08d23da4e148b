"""``isoexec trace run``: start the two runtimes, trace one batch of prompts, or the sequence that a training run found to differ."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from isoexec.contract import ContractError, contract_for_model
from isoexec.runtimes.megatron.hf_files import HFFiles, save_hf
from isoexec.verify.arguments import check_model, text_config
from isoexec.verify.progress import Progress
from isoexec.verify.prompts import make_prompts, packings, request_seeds
from isoexec.verify.protocol import WorkerError, WorkerGroup, WorkerRefused
from isoexec.verify.run import backend, check_backend, check_graphs, worker_environment
from isoexec.verify.settings import MAX_MODEL_LEN
from isoexec.verify.trace.bundle import Sequence
from isoexec.verify.trace.report import Report
from isoexec.verify.trace.run import Traced, trace

_PASSES = {"score": (False, False), "forward": (True, False), "recompute": (True, True)}


def run(options) -> tuple[Report | None, Path, list[str]]:
    """Trace as the command line says; the report (None: a process died), the bundle's file, and what else is to be said.

    Raises:
        ContractError: a model that cannot be traced.
    """
    check_backend()
    out = Path(options.out)
    (out / "logs").mkdir(parents=True, exist_ok=True)
    file = options.bundle or out / "trace.zip"
    with tempfile.TemporaryDirectory(prefix="isoexec-trace-") as work, WorkerGroup(out / "logs") as group:
        work = Path(work)
        batch = _recorded_batch(options.mismatch, work) if options.mismatch else _made_batch(options, work)
        if options.cuda_graphs:
            check_graphs()
        try:
            session = _Session(options, batch, work, group)
            found = session.trace(file)
            return found, file, _notes(found, session)
        except WorkerRefused as error:
            raise ContractError(str(error)) from None
        except WorkerError as error:
            print(f"isoexec trace: {group.error or error}; nothing was concluded", file=sys.stderr)
            return None, file, []


def _notes(found: Report, session: _Session) -> list[str]:
    notes = []
    if session.engine_slept:
        notes.append("the engine slept when the mismatch was found: it ran on the trainer's weights here, which the last sync gave it")
    if session.captured and not session.captures:
        notes.append("the run's decode steps were replays of CUDA graphs, and these were not: --cuda-graphs --level ops captures them")
    if session.other_tokens:
        notes.append("the engine sampled other tokens this time than in the run")
    elif session.repeats and found.verdict == "identical":
        notes.append("the mismatch did not come back from the same weights and tokens: it depends on what ran before")
    return notes


@dataclass(frozen=True)
class _Batch:
    """What both sides run.

    Attributes:
        model, trainer_model: HF folders of engine and trainer.
        contract: JSON text.
        prompts: token ids.
        seeds: of each prompt's sampling.
        temperature, trainer_temperature: of each side.
        max_tokens: new tokens of each prompt.
        max_model_len: context of the engine.
        recorded: tokens that were sampled when the mismatch was found, by prompt; None where nothing is repeated.
        about: JSON values for the bundle.
        engine_slept: the engine had given its weights up when the mismatch was found: it has the trainer's here.
        captured: the engine's decode steps were replays of CUDA graphs when the mismatch was found.
    """

    model: Path
    trainer_model: Path
    contract: str
    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    trainer_temperature: float
    max_tokens: int
    max_model_len: int
    recorded: list[list[int]] | None
    about: dict
    engine_slept: bool = False
    captured: bool = False


def _made_batch(options, work: Path) -> _Batch:
    """Random prompts for the models that the command line names, or for one that is made."""
    model = Path(options.model).resolve() if options.model else work / options.architecture
    trainer_model = Path(options.trainer_model).resolve() if options.trainer_model else model
    for folder in (model, trainer_model):
        if folder.parent != work:
            check_model(folder)
    if not options.model:
        from isoexec.verify.checkpoint import make_checkpoint

        make_checkpoint(model, options.architecture)
    prompts = make_prompts(options.prompts, text_config(check_model(model))["vocab_size"], seed=20)
    return _Batch(
        model,
        trainer_model,
        contract_for_model(model, backend()).to_json(),
        prompts,
        request_seeds(prompts, seed=21),
        options.temperature,
        options.trainer_temperature or options.temperature,
        options.tokens,
        MAX_MODEL_LEN,
        None,
        {"model": model.name, "trainer model": trainer_model.name},
    )


def _recorded_batch(folder: Path, work: Path) -> _Batch:
    """The sequence that a training run found to differ, on both sides' weights of that step.

    Raises:
        ContractError: the folder is not whole: the run could not keep the weights, or files were left behind when it was moved.
    """
    try:
        found = json.loads((folder / "mismatch.json").read_text(encoding="utf-8"))
        contract = (folder / "contract.json").read_text(encoding="utf-8")
        trainer_model = folder.resolve() / "trainer"
        files = HFFiles(trainer_model)
        model = trainer_model if found["engine_slept"] else _engine_model(folder, files, work / "engine")
        tokens, start = found["tokens"], found["prompt_tokens"]
        return _Batch(
            model,
            trainer_model,
            contract,
            [tokens[:start]],
            [found["seed"]],
            found["temperature"],
            found["temperature"],
            len(tokens) - start,
            len(tokens),
            [tokens[start:]],
            {"mismatch": folder.name, "step": found["step"], "weight version": found["weight_version"], "sequence": found["sequence"]},
            found["engine_slept"],
            found["captured"],
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ContractError(
            f"--mismatch {folder}: {type(error).__name__}: {error}; expected a run's mismatch-<step> with mismatch.json, contract.json, "
            "engine.safetensors and trainer/"
        ) from error


def _engine_model(folder: Path, trainer: HFFiles, model: Path) -> Path:
    """``model``, written: the engine's weights of a mismatch, in the form and beside the other files of the trainer's checkpoint."""
    shutil.copytree(folder / "trainer", model, ignore=shutil.ignore_patterns("*.safetensors*"))
    with safe_open(folder / "engine.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_hf(trainer.in_stored_form(tensors), model)
    return model


class _Session:
    """Two workers on one batch."""

    def __init__(self, options, batch: _Batch, work: Path, group: WorkerGroup):
        self._options, self._batch, self._progress = options, batch, Progress()
        contract = work / "contract.json"
        contract.write_text(batch.contract, encoding="utf-8")
        self._engine, self._trainer = (
            group.start(name, f"isoexec.verify.{name}_worker", worker_environment(contract)) for name in ("engine", "trainer")
        )
        self._progress(f"two processes import their frameworks; logs: {options.out}/logs")
        shape = dict(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=batch.max_model_len, cuda_graphs=options.cuda_graphs)
        self._engine.call("open", options.timeout, model=str(batch.model), contract=str(contract), shape=shape)
        self._trainer.call("open", options.timeout, model=str(batch.trainer_model), contract=str(contract), learning_rate=1e-3)

    def trace(self, file: Path) -> Report:
        """Run, record, compare."""
        about = self._batch.about | {"temperature": repr(self._batch.temperature), "trainer pass": self._options.scoring}
        return trace(Traced(self._sample, self._score), self._sequences, file, about, level=self._options.level)

    @property
    def repeats(self) -> bool:
        """Whether it repeats what a run found to differ."""
        return self._batch.recorded is not None

    @property
    def engine_slept(self) -> bool:
        """Whether the engine's own weights were gone, and it has the trainer's."""
        return self._batch.engine_slept

    @property
    def captured(self) -> bool:
        """Whether the decode steps of the run that is repeated were captured."""
        return self._batch.captured

    @property
    def captures(self) -> bool:
        """Whether the decode steps of this session are."""
        return self._options.cuda_graphs

    @property
    def other_tokens(self) -> bool:
        """Whether the engine sampled other tokens than those that the mismatch was found on."""
        return self.repeats and self._batch.recorded != [r["tokens"] for r in self._rollouts]

    def _sample(self, recording: dict) -> None:
        batch = self._batch
        self._rollouts = self._engine.call(
            "generate", self._options.timeout, prompts=batch.prompts, seeds=batch.seeds, temperature=batch.temperature,
            max_tokens=batch.max_tokens, one_at_a_time=False, rows=False, trace=recording,
        )["rollouts"]  # fmt: skip
        self._progress(f"engine: {sum(len(r['tokens']) for r in self._rollouts)} tokens sampled and recorded")

    def _score(self, recording: dict) -> None:
        pairs = [[prompt, rollout["tokens"]] for prompt, rollout in zip(self._batch.prompts, self._rollouts)]
        grad, recompute = _PASSES[self._options.scoring]
        packing = packings([len(p) + len(t) for p, t in pairs], tokens=1024, seed=1)
        self._scores = self._trainer.call(
            "score", self._options.timeout, sequences=pairs, temperature=self._batch.trainer_temperature, packing=packing, grad=grad,
            recompute=recompute, rows=False, trace=recording,
        )  # fmt: skip
        self._progress("trainer: scored and recorded")

    def _sequences(self) -> dict[int, Sequence]:
        return {
            number: Sequence(prompt + r["tokens"], len(prompt), {"engine": r["logprobs"], "trainer": s["logprobs"]})
            for number, (prompt, r, s) in enumerate(zip(self._batch.prompts, self._rollouts, self._scores))
        }
