"""One arm of the comparison: an engine samples, a trainer scores, the weights move one step, and both do it again."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from isoexec.verify.agreement import Agreement
from isoexec.verify.compare import Comparison, Scored, compare, not_run
from isoexec.verify.progress import Progress
from isoexec.verify.prompts import make_prompts, packings, request_seeds
from isoexec.verify.protocol import OperationFailed, Worker, WorkerGroup, WorkerRefused
from isoexec.verify.settings import SCORE, EngineShape, Plan, Scoring, Setting
from isoexec.verify.trace.mismatch import Mismatch, Traceback, trace_mismatch
from isoexec.verify.trace.run import Traced

FIRST_WEIGHTS, SECOND_WEIGHTS = "first", "second"


@dataclass
class Sample:
    """What one setting gave: sequences in the order of the prompts, and the trainer's scores by the scoring's name."""

    setting: Setting
    shape: EngineShape
    weights: str
    prompts: list[list[int]]
    seeds: list[int]
    tokens: list[list[int]]
    engine: list[Scored]
    evidence: dict[str, int]
    trainer: dict[str, list[Scored]] = field(default_factory=dict)

    def sequences(self) -> list[list[list[int]]]:
        """[prompt, generated tokens] of every sequence."""
        return [[p, t] for p, t in zip(self.prompts, self.tokens)]


@dataclass(frozen=True)
class ModelUnderTest:
    """Name and folders of the checkpoint.

    The trainer opens ``trainer_folder``, which differs from ``folder`` only in the self-test. ``control_folder`` holds the checkpoint with
    one weight off by one ulp.
    """

    name: str
    folder: Path
    trainer_folder: Path
    control_folder: Path
    vocab_size: int
    contract: Path


class ArmRun:
    """Runs the plan with one engine and one trainer process. The trainer scores while the engine samples the next setting."""

    def __init__(
        self, arm: str, model: ModelUnderTest, plan: Plan, workers: tuple[Worker, Worker], group: WorkerGroup,
        work: Path, progress: Progress, timeout: float, out: Path | None = None,
    ):  # fmt: skip
        """Traces of mismatches go to the folder ``out``; None: no mismatch is traced."""
        self.arm, self.model, self.plan = arm, model, plan
        self._engine, self._trainer = workers
        self._group, self._progress, self._timeout = group, progress, timeout
        self._contract = str(model.contract) if arm == "isoexec" else None
        self._shape: EngineShape | None = None
        self._weights = FIRST_WEIGHTS  # of the open engine
        self._out = out
        self._queue = ThreadPoolExecutor(1, thread_name_prefix=f"trainer-{arm}")
        self._scoring: list[Future] = []
        self.second_folder = work / f"{model.name}-{arm}-second"
        self.prompts = make_prompts(plan.prompt_count, model.vocab_size, seed=plan.seed)
        self.seeds = request_seeds(self.prompts, seed=plan.seed + 1)
        self.samples: list[Sample] = []
        self.unable: str | None = None
        self._opened: Path | None = None  # by score_others
        self.agreement: Agreement | None = None  # of the isoexec arm
        self.traceback: Traceback | None = None

    def run(self) -> list[Comparison]:
        """Every setting of the plan, compared.

        Upstream does not run everything on every machine: where the native arm fails, it keeps what it has and says why in :attr:`unable`.

        Raises:
            WorkerError: a worker failed; the whole group has been stopped.
        """
        try:
            if self._contract is not None:
                served = self._enqueue("served")
                self.agreement = Agreement(self.model.contract, self._ask_engine, self._ask_trainer, served)
            self._enqueue("open", **self._trainer_arguments(self.model.trainer_folder))
            for engine_run in self.plan.engines:
                self._open(engine_run.shape)
                for setting in engine_run.before:
                    self._sample(setting, FIRST_WEIGHTS)
            self._run_after_sync()
            for scoring in self._scoring:
                scoring.result()
            if self.agreement is not None:
                self.agreement.check_served(self._cases())
                self._progress(f"{self.arm}: {self.agreement.line()}")
        except BaseException as error:
            if not self._may_fail(error):
                self._group.fail(error)
                raise
            self.unable = str(error)
            self._progress(f"{self.arm}: cannot go on: {self.unable}")
        finally:
            self._queue.shutdown(wait=True, cancel_futures=self.unable is None)  # what was sampled before is scored all the same
        scored = [(s, scoring) for s in self.samples for scoring in self._scorings(s.setting) if scoring.name in s.trainer]
        comparisons = [
            compare(self.model.name, self.arm, f"{s.setting.name} / {scoring.name}", s.engine, s.trainer[scoring.name])
            for s, scoring in scored
        ]
        comparisons += self._not_run({c.setting for c in comparisons})
        wrong = [pair for pair, c in zip(scored, comparisons) if not c.passed]
        if wrong and self.arm == "isoexec" and self._out is not None:
            self.traceback = self._trace(*wrong[0])
        return comparisons

    def _not_run(self, ran: set[str]) -> list[Comparison]:
        settings = [s for engine_run in self.plan.engines for s in (*engine_run.before, *engine_run.after_sync)]
        names = [f"{setting.name} / {scoring.name}" for setting in settings for scoring in self._scorings(setting)]
        return [not_run(self.model.name, self.arm, name, self.unable or "unknown") for name in names if name not in ran]

    def _trace(self, sample: Sample, scoring: Scoring) -> Traceback:
        """Run a setting again with its ops recorded, on the weights that it had."""
        name = f"{self.model.name} {sample.setting.name} {scoring.name}"
        self._progress(f"{self.arm}: {sample.setting.name} / {scoring.name}: bits differ; running it again to find the first difference")
        if (sample.shape, sample.weights) != (self._shape, self._weights):
            self._open_engine(sample.shape)
            if sample.weights == SECOND_WEIGHTS:
                self._sync()
        if sample.weights == FIRST_WEIGHTS:
            self._trainer.call("open", self._timeout, **self._trainer_arguments(self.model.trainer_folder))
        order = self._order(sample.setting)
        rows = [s.rows for s in sample.engine], [s.rows for s in sample.trainer[scoring.name]]
        mismatch = Mismatch(
            name,
            sample.prompts,
            sample.tokens,
            [s.logprobs for s in sample.engine],
            [s.logprobs for s in sample.trainer[scoring.name]],
            rows,
            Traced(
                lambda recording: self._generate(sample.setting, recording),
                lambda recording: self._score(sample, scoring, recording),
                order,
            ),
            {"model": self.model.name, "setting": sample.setting.name, "scoring": scoring.name, "weights": sample.weights,
             "temperature": repr(sample.setting.temperature)},
            "ops" if sample.shape.cuda_graphs else "state",  # a replay does not show what caches hold
        )  # fmt: skip
        return trace_mismatch(mismatch, self._out)

    def _may_fail(self, error: BaseException) -> bool:
        return self.arm == "native" and isinstance(error, OperationFailed) and not isinstance(error, WorkerRefused)

    def control(self) -> Comparison:
        """Negative control, after :meth:`run`: the samples of ``train_on`` against a trainer with one weight off by one ulp."""
        sample = next(s for s in self.samples if s.setting.name == self.plan.train_on)
        self._trainer.call("open", self._timeout, **self._trainer_arguments(self.model.control_folder))
        scores = self._score(sample, SCORE)
        return compare(self.model.name, self.arm, f"{sample.setting.name} / planted ulp", sample.engine, scores)

    def score_others(self, folder: Path, sequences: list[list[list[int]]], temperature: float) -> list[list[int]]:
        """This arm's trainer, after :meth:`run`, on [prompt, tokens] that another arm sampled: fp32 bit patterns by sequence."""
        if self._opened != folder:
            self._trainer.call("open", self._timeout, **self._trainer_arguments(folder))
            self._opened = folder
        alone = [[index] for index in range(len(sequences))]  # one sequence a group, as in _packing
        answer = self._trainer.call(
            "score", self._timeout, sequences=sequences, temperature=temperature, packing=alone, grad=False, recompute=False, rows=False
        )
        return [a["logprobs"] for a in answer]

    def _trainer_arguments(self, folder: Path) -> dict:
        return {"model": str(folder), "contract": self._contract, "learning_rate": self.plan.learning_rate}

    def _run_after_sync(self) -> None:
        """The engine that is open comes first: its caches hold what the old weights computed."""
        runs = [r for r in self.plan.engines if r.after_sync]
        if not runs:
            return
        self._step()
        for engine_run in sorted(runs, key=lambda r: r.shape != self._shape):
            self._open(engine_run.shape)
            if self.agreement is not None:
                self.agreement.shake_hands()
            self._sync()
            if self.agreement is not None:
                self.agreement.check_weights(f"sync to {engine_run.shape.name!r}")
            for setting in engine_run.after_sync:
                self._sample(setting, SECOND_WEIGHTS)

    def _sync(self) -> None:
        self._engine.call("sync", self._timeout, weights=str(self.second_folder))
        self._weights = SECOND_WEIGHTS

    def _open(self, shape: EngineShape) -> None:
        if shape == self._shape:
            return
        began = time.monotonic()
        first = self._shape is None
        self._open_engine(shape)
        if self.agreement is not None:
            self.agreement.shake_hands(wait=first)
            if first and self.model.trainer_folder == self.model.folder:
                self.agreement.check_weights("opened")
            elif first:
                self.agreement.check_planted()  # and goes on: the tokens have to show it too
        self._progress(f"{self.arm}: engine {shape.name!r} ready in {time.monotonic() - began:.1f} s")

    def _open_engine(self, shape: EngineShape) -> None:
        self._engine.call("open", self._timeout, model=str(self.model.folder), contract=self._contract, shape=shape.arguments())
        self._shape, self._weights = shape, FIRST_WEIGHTS

    def _sample(self, setting: Setting, weights: str) -> None:
        began = time.monotonic()
        prompts, seeds = self.prompts[: setting.prompts], self.seeds[: setting.prompts]
        answer = self._generate(setting)
        order = self._order(setting)
        rollouts = [rollout for _, rollout in sorted(zip(order, answer["rollouts"], strict=True), key=lambda pair: pair[0])]
        sample = Sample(
            setting,
            self._shape,
            weights,
            prompts,
            seeds,
            tokens=[r["tokens"] for r in rollouts],
            engine=[Scored(r["logprobs"], r["rows"]) for r in rollouts],
            evidence=answer["evidence"],
        )
        self.samples.append(sample)
        for scoring in self._scorings(setting):
            self._enqueue_score(sample, scoring)
        count = sum(len(t) for t in sample.tokens)
        self._progress(f"{self.arm}: {setting.name}: {count} tokens sampled in {time.monotonic() - began:.1f} s")

    def _order(self, setting: Setting) -> list[int]:
        """Prompts in the order in which a setting submits them."""
        order = list(range(len(self.prompts[: setting.prompts])))
        return order[1::2] + order[::2][::-1] if setting.permuted else order

    def _generate(self, setting: Setting, recording: dict | None = None) -> dict:
        order = self._order(setting)
        return self._engine.call(
            "generate",
            self._timeout,
            prompts=[self.prompts[i] for i in order],
            seeds=[self.seeds[i] for i in order],
            temperature=setting.temperature,
            max_tokens=setting.max_tokens,
            one_at_a_time=setting.one_at_a_time,
            rows=True,
            evict_at=setting.evict_at,
            **({} if recording is None else {"trace": recording}),
        )

    def _scorings(self, setting: Setting) -> tuple[Scoring, ...]:
        whole = self.arm == "isoexec" or self.plan.every_native_scoring
        return setting.scorings if whole else setting.scorings[:1]

    def _enqueue_score(self, sample: Sample, scoring: Scoring) -> None:
        def score():
            sample.trainer[scoring.name] = self._score(sample, scoring)

        self._submit(score)

    def _score(self, sample: Sample, scoring: Scoring, recording: dict | None = None) -> list[Scored]:
        answer = self._trainer.call(
            "score",
            self._timeout,
            sequences=sample.sequences(),
            temperature=sample.setting.temperature,
            packing=self._packing(sample, scoring),
            grad=scoring.grad,
            recompute=scoring.recompute,
            rows=True,
            **({} if recording is None else {"trace": recording}),
        )
        return [Scored(a["logprobs"], a["rows"]) for a in answer]

    def _packing(self, sample: Sample, scoring: Scoring) -> list[list[int]]:
        """Upstream's local attention takes no packed sequences: a native group is padded, so one sequence a group is its cheapest form."""
        lengths = [len(p) + len(t) for p, t in sample.sequences()]
        if self.arm == "native":
            return [[index] for index in range(len(lengths))]
        return packings(lengths, tokens=scoring.pack_tokens, seed=scoring.pack_seed)

    def _step(self) -> None:
        sample = next(s for s in self.samples if s.setting.name == self.plan.train_on)
        shutil.copytree(self.model.folder, self.second_folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin"))
        result = self._enqueue(
            "step",
            sequences=sample.sequences(),
            temperature=sample.setting.temperature,
            packing=self._packing(sample, SCORE),
            weights=str(self.second_folder),
        ).result()
        self._progress(f"{self.arm}: optimizer step, loss {result['loss']:.4g}, gradient norm {result['grad_norm']:.4g}")

    def _ask_engine(self, operation: str):
        return self._engine.call(operation, self._timeout)

    def _ask_trainer(self, operation: str):
        return self._enqueue(operation).result()

    def _cases(self) -> set[str]:
        """Cases that the plan executes."""
        scorings = [scoring for sample in self.samples for scoring in sample.setting.scorings]
        ran = {"trainer_recompute" if s.recompute else "trainer_forward" if s.grad else "trainer_score" for s in scorings}
        return ran | {"engine_prefill", "engine_decode"}

    def _enqueue(self, operation: str, **arguments) -> Future:
        return self._submit(lambda: self._trainer.call(operation, self._timeout, **arguments))

    def _submit(self, task) -> Future:
        future = self._queue.submit(task)
        future.add_done_callback(self._stop_on_failure)
        self._scoring.append(future)
        return future

    def _stop_on_failure(self, future: Future) -> None:
        if not future.cancelled() and future.exception() is not None and not self._may_fail(future.exception()):
            self._group.fail(future.exception())
