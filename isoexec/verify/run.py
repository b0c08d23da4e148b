"""``isoexec verify``: start the processes, run both arms, judge, report."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import shutil
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from isoexec.contract import CONTRACT_VARIABLE, Claims, ContractError, ExecutionContract, Numerics, contract_for_model
from isoexec.contract.architectures import has_experts
from isoexec.verify.accuracy import Accuracy, measure
from isoexec.verify.arguments import check_limits, check_model, text_config
from isoexec.verify.arm import FIRST_WEIGHTS, ArmRun, ModelUnderTest
from isoexec.verify.compare import Comparison
from isoexec.verify.folder import alone
from isoexec.verify.plant import plant_ulp
from isoexec.verify.progress import Progress
from isoexec.verify.protocol import Worker, WorkerError, WorkerGroup, WorkerRefused
from isoexec.verify.report import table, write_json, write_picture
from isoexec.verify.settings import MADE_ARCHITECTURES, Plan, brief_plan, control_plan, full_plan, quick_plan
from isoexec.verify.trace.mismatch import Traceback
from isoexec.verify.verdict import BAD_INPUT, INCONCLUSIVE, Verdict, add_changed_logprobs

ARMS = ("native", "isoexec")
_PACKAGES = ("torch", "vllm", "megatron-core", "transformers")


@dataclass(frozen=True)
class Options:
    """Command line of ``isoexec verify``.

    Attributes:
        model: HF-format folder, or None to make a random checkpoint of every supported architecture.
        out: folder for verify.json, verify.png and logs/.
        plan: what to run on the model, or on the first that is made.
        later_plan: what to run on the others that are made.
        plant: move one weight of the isoexec trainer's copy by one ulp; the run must then report differences.
        timeout: seconds in which a worker must answer.
        numerics: constants of the contract that are not its defaults.
        native: also run upstream's own kernels, to compare with; they prove nothing.
        engine_tp: tensor-parallel ranks of the isoexec arm's engine, which share out experts too; the native arm's has one.
    """

    model: Path | None
    out: Path
    plan: Plan
    later_plan: Plan
    plant: bool = False
    timeout: float = 600.0
    numerics: dict = dataclasses.field(default_factory=dict)
    native: bool = True
    engine_tp: int = 1


def make_options(
    model: str | None,
    out: str,
    *,
    full: bool,
    plant: bool,
    timeout: float,
    prompts: int | None = None,
    tokens: int | None = None,
    numerics: dict | None = None,
    native: bool = True,
    cuda_graphs: bool = False,
    engine_tp: int = 1,
) -> Options:
    """Check the inputs before anything is started.

    Raises:
        ContractError: the model folder cannot be verified; says why in one line.
    """
    plan = control_plan() if plant else full_plan() if full else quick_plan()
    later_plan = plan if plant or full else brief_plan()
    folder = Path(model).resolve() if model else None
    if folder:
        check_model(folder)
    check_limits(prompts, tokens)
    Numerics(**(numerics or {}))
    check_backend()
    plans = plan.limited(prompts, tokens), later_plan.limited(prompts, tokens)
    if cuda_graphs:
        check_graphs()
        plans = tuple(each.captured() for each in plans)
    options = Options(folder, Path(out), *plans, plant, timeout, numerics or {}, native, engine_tp)
    if engine_tp != 1:
        _claimed(_uncomposed(folder, options), engine_tp)
    return options


def backend() -> str:
    """What this environment's vLLM is built for: ``"cpu"`` or ``"cuda"``."""
    return "cpu" if "cpu" in importlib.metadata.version("vllm") else "cuda"


def check_backend() -> None:
    """Refuse an environment that is built for GPUs where none is visible.

    Raises:
        ContractError: says which to build.
    """
    if backend() == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        version = importlib.metadata.version("vllm")
        raise ContractError(
            f"this environment holds vLLM {version}, which computes on a GPU, and none is visible; run it on a GPU host, or "
            "`make build verify-logprobs BACKEND=cpu`"
        )


def check_graphs() -> None:
    """Refuse to capture an engine where there are no graphs.

    Raises:
        ContractError: says why.
    """
    if backend() == "cpu":
        raise ContractError("--cuda-graphs: expected an environment for GPUs, found one for the CPU, which has no graphs; leave it out")


def verify(options: Options) -> int:
    """Run everything; returns the exit status.

    0: every isoexec token has equal bits; 1: some differ, or the logprobs are less accurate than allowed; 2: refused, as bad input or
    since the processes do not agree on what they run; 3: inconclusive.
    """
    logs = options.out / "logs"
    with alone(options.out):
        logs.mkdir(exist_ok=True)
        older = [options.out / "verify.json", options.out / "verify.png", *options.out.glob("trace-*.zip")]
        for file in older:  # a run that ends early leaves no older result behind
            file.unlink(missing_ok=True)
        return _verify(options, logs)


def _verify(options: Options, logs: Path) -> int:
    progress = Progress()
    work = Path(tempfile.mkdtemp(prefix="isoexec-verify-"))
    group = WorkerGroup(logs)
    try:
        with group:
            return _Run(options, group, work, progress).run()
    except (WorkerError, ContractError) as error:
        first = group.error or error
        print(f"isoexec verify: {first}", file=sys.stderr)
        return BAD_INPUT if isinstance(first, (WorkerRefused, ContractError)) else INCONCLUSIVE
    except Exception as error:  # an exit status of 1 must mean that logprobs differ
        traceback.print_exc()
        print(f"isoexec verify: {type(error).__name__}: {error}; nothing was concluded", file=sys.stderr)
        return INCONCLUSIVE
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Run:
    """State of one run: workers by role and arm, and what they gave."""

    def __init__(self, options: Options, group: WorkerGroup, work: Path, progress: Progress):
        self._options, self._group, self._work, self._progress = options, group, work, progress
        self._arms = ARMS if options.native and not options.plant else ("isoexec",)
        self._verdict = Verdict()
        self._comparisons: list[Comparison] = []
        self._models: dict[str, dict] = {}
        self._tracebacks: list[Traceback] = []

    def run(self) -> int:
        """Every model; a run that ends early reports those it has finished."""
        try:
            self._start_workers()
            if self._options.model:
                self._run_model(self._options.model, self._options.plan)
            else:
                for architecture in MADE_ARCHITECTURES:
                    first = architecture == MADE_ARCHITECTURES[0]
                    self._run_model(self._make_checkpoint(architecture), self._options.plan if first else self._options.later_plan)
        except BaseException as error:  # also Ctrl-C
            if self._models:
                self._verdict.inconclusive.append(f"the run ended after {', '.join(self._models)}: {str(error) or type(error).__name__}")
                self._report()
            raise
        return self._report()

    def _start_workers(self) -> None:
        model = self._options.model
        contract = _contract_of(model, self._options) if model else _uncomposed(None, self._options)
        first_contract = self._work / "first.contract.json"  # each model's own is named when it is opened
        first_contract.write_text(contract.to_json(), encoding="utf-8")
        self._reference = self._group.start("reference", "isoexec.verify.reference_worker", worker_environment(None))
        self._workers: dict[str, tuple[Worker, Worker]] = {}
        for arm in self._arms:
            environment = worker_environment(first_contract if arm == "isoexec" else None)
            self._workers[arm] = (
                self._group.start_ranks(
                    self._options.engine_tp if arm == "isoexec" else 1, f"engine-{arm}", "isoexec.verify.engine_worker", environment
                ),
                self._group.start(f"trainer-{arm}", "isoexec.verify.trainer_worker", environment),
            )
        self._progress(f"{len(self._group.workers)} processes import their frameworks; logs: {self._options.out / 'logs'}")

    def _make_checkpoint(self, architecture: str) -> Path:
        """The reference makes it, while the others still import."""
        folder = self._work / architecture
        self._reference.call(
            "make_checkpoint", self._options.timeout, folder=str(folder), architecture=architecture, seed=0
        )
        self._progress(f"made a checkpoint: {architecture}")
        return folder

    def _run_model(self, folder: Path, plan: Plan) -> None:
        model = self._describe(folder)
        runs = {arm: self._arm_run(arm, model, plan) for arm in self._arms}
        with ThreadPoolExecutor(len(runs), thread_name_prefix="arm") as pool:
            futures = {arm: pool.submit(run.run) for arm, run in runs.items()}
            try:
                comparisons = [c for future in futures.values() for c in future.result()]
            except BaseException as error:  # also Ctrl-C: the arms end when their workers do
                self._group.fail(error)
                raise
        traced = runs["isoexec"].traceback
        self._tracebacks += [traced] if traced else []
        control = runs["isoexec"].control()
        self._progress(f"control: one ulp in one weight changes {control.tokens - control.equal_tokens} of {control.tokens} tokens")
        samples = {arm: run.samples for arm, run in runs.items()}
        for arm_samples in samples.values():
            add_changed_logprobs(arm_samples)
        unable = {arm: run.unable for arm, run in runs.items() if run.unable}
        self._verdict.warnings += [f"{model.name}: {arm}: did not run every setting: {why}" for arm, why in unable.items()]
        errors = self._accuracy(model, runs["isoexec"], runs["native"]) if "native" in runs else None
        self._verdict.judge_model(model, comparisons, samples, errors, control)
        self._comparisons += comparisons
        self._models[model.name] = {
            "contract": runs["isoexec"].agreement.record,
            "mean_abs_error_to_hf_fp32": errors and _finite(dataclasses.asdict(errors)),
            "unable": unable,
            "control": control.as_run(),
            "trace": traced.as_json() if traced else None,
            "evidence": {arm: {s.setting.name: s.evidence for s in arm_samples} for arm, arm_samples in samples.items()},
        }

    def _describe(self, folder: Path) -> ModelUnderTest:
        config = check_model(folder)
        contract = self._work / f"{folder.name}.contract.json"
        contract.write_text(_contract_of(folder, self._options).to_json(), encoding="utf-8")
        planted = self._work / f"{folder.name}-planted"
        weight = plant_ulp(folder, planted)
        if self._options.plant:
            self._progress(f"planted: one ulp in the trainer's copy of {weight}")
        return ModelUnderTest(
            name=folder.name,
            folder=folder,
            trainer_folder=planted if self._options.plant else folder,
            control_folder=planted,
            vocab_size=text_config(config)["vocab_size"],
            contract=contract,
        )

    def _arm_run(self, arm: str, model: ModelUnderTest, plan: Plan) -> ArmRun:
        options = self._options
        traces = options.out if options.engine_tp == 1 else None  # a rank's rows are parts of the trainer's: no trace compares them
        return ArmRun(arm, model, plan, self._workers[arm], self._group, self._work, self._progress, options.timeout, traces)

    def _accuracy(self, model: ModelUnderTest, isoexec: ArmRun, native: ArmRun) -> Accuracy:
        """Both arms against HF in fp32, over all tokens that isoexec generated."""

        def folder(weights: str) -> Path:
            return model.folder if weights == FIRST_WEIGHTS else isoexec.second_folder

        def reference(weights: str, sequences: list, temperature: float) -> list[list[int]]:
            arguments = {"model": str(folder(weights)), "sequences": sequences, "temperature": temperature}
            return self._reference.call("score", self._options.timeout, **arguments)

        result = measure(
            isoexec.samples, reference, lambda weights, *sampled: native.score_others(folder(weights), *sampled)
        )
        self._progress(
            f"mean |logprob - HF fp32| over {result.tokens} tokens: isoexec {result.isoexec:.3e}, native trainer {result.native:.3e} nats"
        )
        return result

    def _report(self) -> int:
        options, status = self._options, self._verdict.status
        details = {
            "status": status,
            "messages": self._verdict.lines(),
            "models": self._models,
            "versions": _versions(),
            "seconds": {"total": round(self._progress.seconds, 1)} | {w.name: w.seconds for w in self._group.workers},
        }
        write_json(options.out / "verify.json", self._comparisons, details)
        write_picture(options.out / "verify.png", self._comparisons)
        print(table([c.as_run() for c in self._comparisons]))
        for model, entry in self._models.items():
            if error := entry["mean_abs_error_to_hf_fp32"]:
                print(
                    f"{model}: mean |logprob - HF fp32| over {error['tokens']} tokens: "
                    f"isoexec {_said(error['isoexec'])}, native trainer {_said(error['native'])}"
                )
        for line in self._verdict.lines():
            print(line)
        for line in (line for found in self._tracebacks for line in found.lines()):
            print(line)
        isoexec = [c for c in self._comparisons if c.arm == "isoexec"]
        print(
            f"isoexec: {sum(c.equal_tokens for c in isoexec)} of {sum(c.tokens for c in isoexec)} tokens have the same bits on both sides; "
            f"{self._progress.seconds:.0f} s; {options.out / 'verify.json'}, {options.out / 'verify.png'}"
        )
        return status


def _contract_of(folder: Path, options: Options) -> ExecutionContract:
    """The contract of a checkpoint, pinned to the ops of this installation: the workers refuse to run others."""
    from isoexec.runtimes.compose import composed  # imports torch, which bad input has no need of

    return composed(_claimed(_uncomposed(folder, options), options.engine_tp))


def _uncomposed(folder: Path | None, options: Options) -> ExecutionContract:
    """The contract of a checkpoint, or of the first that is made, before ops are pinned."""
    return contract_for_model(folder, backend(), **options.numerics) if folder else ExecutionContract(MADE_ARCHITECTURES[0], backend())


def _claimed(contract: ExecutionContract, engine_tp: int) -> ExecutionContract:
    """``contract`` with the claims of such an engine; a degree that it has no leaves or groups for is refused."""
    sparse = engine_tp if has_experts(contract.architecture) else 1
    return dataclasses.replace(contract, claims=Claims(engine_tp=engine_tp, engine_ep=sparse))


def _finite(numbers: dict) -> dict:
    """The numbers, null where JSON has none."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


def _said(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.3e}"


def worker_environment(contract: Path | None) -> dict[str, str | None]:
    """Laid over the environment of a worker: one thread for each of several processes, nothing fetched, GPUs for a build for GPUs alone, and
    no rank of a job in which this process may be one."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if backend() == "cpu" else {}
    return hidden | dict.fromkeys(("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")) | {
        CONTRACT_VARIABLE: str(contract) if contract else None,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in _PACKAGES}
