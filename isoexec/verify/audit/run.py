"""``isoexec audit``: start one process for each side, audit every model in both, judge, report."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from isoexec.contract import CASES, ContractError, Numerics, check_served, contract_for_model
from isoexec.verify.arguments import check_model, text_config
from isoexec.verify.audit.report import (
    BAD_INPUT, CASE_COLUMNS, CLEAN, INCONCLUSIVE, STRAY, STRAY_COLUMNS, VERDICTS, case_rows, stray_rows, table,
)  # fmt: skip
from isoexec.verify.progress import Progress
from isoexec.verify.protocol import WorkerError, WorkerGroup, WorkerRefused
from isoexec.verify.run import backend, check_backend, worker_environment
from isoexec.verify.settings import MADE_ARCHITECTURES

_AUX_LOSS = 0.01  # the router's loss hangs on the path in training; it must not lie on it
#: Tokens of an engine's step at most, where a cache block is not longer, and sequences.
BUDGET, _SEQUENCES = 100, 8
#: Lengths of prompts before, on and after a chunk of 64.
_PROMPT_LENGTHS = (1, 63, 65)
#: By how many tokens two more are longer than the budget; they share all but one token.
_BEYOND = 30
_GENERATED = 3


@dataclass
class Findings:
    """Of one model: per case what ran and what strayed, and sentences that make the audit fail or void."""

    cases: dict[str, dict]
    faults: list[str] = field(default_factory=list)
    voids: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """A stray op is conclusive, so it wins over a case that was not seen."""
        if self.faults or any(found["strays"] for found in self.cases.values()):
            return STRAY
        return INCONCLUSIVE if self.voids else CLEAN


def audit(model: str | None, json_file: str | None, timeout: float) -> int:
    """Audit ``model``, or a small random checkpoint of every supported architecture; returns the exit status.

    0: no stray op in any case; 1: some; 2: bad input; 3: inconclusive (a process died, or a case did not run or was not seen).

    Args:
        model: HF-format folder or None.
        json_file: where to write everything that was found, or None.
        timeout: seconds in which a process must answer.
    """
    folder = Path(model).resolve() if model else None
    if folder:
        check_model(folder)
    check_backend()
    if json_file and (Path(json_file).is_dir() or not Path(json_file).resolve().parent.is_dir()):
        raise ContractError(f"--json {json_file}: expected a file in a folder that exists")
    work = Path(tempfile.mkdtemp(prefix="isoexec-audit-"))
    group = WorkerGroup(work)
    status, findings = INCONCLUSIVE, {}
    try:
        with group:
            findings = _audit_models(folder, group, work, timeout)
        status = max((f.status for f in findings.values()), key=(CLEAN, INCONCLUSIVE, STRAY).index)
        _print(findings, status)
    except (WorkerError, ContractError) as error:
        first = group.error or error
        status = BAD_INPUT if isinstance(first, (WorkerRefused, ContractError)) else INCONCLUSIVE
        print(f"isoexec audit: {first}", file=sys.stderr)
    except Exception as error:  # an exit status of 1 must mean a stray op
        traceback.print_exc()
        print(f"isoexec audit: {type(error).__name__}: {error}; nothing was concluded", file=sys.stderr)
    finally:
        if json_file:
            _write_json(Path(json_file), findings, status)
        if status in (CLEAN, STRAY):
            shutil.rmtree(work, ignore_errors=True)  # else the logs, which the message names, stay
    return status


def _audit_models(folder: Path | None, group: WorkerGroup, work: Path, timeout: float) -> dict[str, Findings]:
    progress = Progress()
    environment = worker_environment(None) | {"TRITON_INTERPRET": None}
    workers = [group.start(side, f"isoexec.verify.audit.{side}_worker", environment) for side in ("engine", "trainer")]
    engine, trainer = workers
    progress("two processes import their frameworks")
    findings = {}
    for architecture in (None,) if folder else MADE_ARCHITECTURES:
        model = folder or work / architecture
        if architecture:
            sizes = {"num_hidden_layers": 2} | ({"layer_types": ["linear_attention", "full_attention"]} if "3_5" in architecture else {})
            trainer.call("make_checkpoint", timeout, folder=str(model), architecture=architecture, sizes=sizes)
        findings[model.name] = _audit_model(model, engine, trainer, group, work, timeout)
        strays = len(stray_rows(model.name, findings[model.name].cases))
        progress(f"{model.name}: {strays} call sites of stray ops")
    return findings


def _audit_model(model: Path, engine, trainer, group: WorkerGroup, work: Path, timeout: float) -> Findings:
    contract = contract_for_model(model, backend())
    file = work / f"{model.name}.contract.json"
    file.write_text(contract.to_json(), encoding="utf-8")
    config = check_model(model)
    text, shape = text_config(config), engine_shape(config, contract.numerics)
    prompts, sequences = tokens(text["vocab_size"], shape["max_num_batched_tokens"])

    def engine_side() -> dict:
        engine.call("open", timeout, model=str(model), contract=str(file), shape=shape)
        return engine.call("audit", timeout, prompts=prompts, seeds=list(range(len(prompts))))

    def trainer_side() -> dict:
        aux_loss = _AUX_LOSS if text.get("num_experts") or text.get("num_local_experts") else 0.0
        trainer.call("open", timeout, model=str(model), contract=str(file), aux_loss=aux_loss)
        return trainer.call("audit", timeout, sequences=sequences, packing=[[0, 3], [2, 1, 4]])

    with ThreadPoolExecutor(2, thread_name_prefix="audit") as pool:
        sides = [pool.submit(engine_side), pool.submit(trainer_side)]
        try:
            return judge(contract, *(side.result() for side in sides))
        except BaseException as error:  # also Ctrl-C: the other side ends too
            group.fail(error)
            raise


def engine_shape(config: dict, numerics: Numerics) -> dict:
    """Of the engine: a prompt longer than the budget is prefilled in chunks beside decoding sequences; the prefix cache copies states.

    A step must hold a cache block, which in a hybrid is as long as a state of Gated DeltaNet is large.
    """
    from isoexec.runtimes.vllm import cache_size  # torch, which a refused model need not wait for

    shortest = {"block_size": 32, "cache_tokens": None, "max_num_seqs": _SEQUENCES, "max_model_len": 1, "prefix_caching": True}
    block, _ = cache_size.blocks(config, numerics, **shortest)
    budget = max(BUDGET, block)
    longest = budget + _BEYOND + _GENERATED
    return {
        "max_num_seqs": _SEQUENCES, "max_num_batched_tokens": budget, "enable_prefix_caching": True, "max_model_len": max(256, longest),
    }  # fmt: skip


def tokens(vocab_size: int, budget: int = BUDGET) -> tuple[list[list[int]], list[tuple[list[int], list[int]]]]:
    """(prompts, (prompt, generated) pairs), random ids.

    Args:
        budget: tokens of an engine's step.
    """
    draw = random.Random(0)

    def some(count: int) -> list[int]:
        return [draw.randrange(3, vocab_size) for _ in range(count)]

    prompts = [some(n) for n in (*_PROMPT_LENGTHS, budget + _BEYOND, budget + _BEYOND - 1)]
    prompts[-1][:-1] = prompts[-2][: len(prompts[-1]) - 1]
    return prompts, [(prompt, some(_GENERATED)) for prompt in prompts]


def judge(contract, *sides: dict) -> Findings:
    """What the evidence of engine and trainer says about one model."""
    cases = {case: side["cases"][case] | {"strays": []} for case in CASES for side in sides if case in side["cases"]}
    findings = Findings(cases)
    for side in sides:
        for stray in side["strays"]:
            cases.setdefault(stray["case"], {"ops": 0, "inside": 0, "outside": [], "strays": []})["strays"].append(stray)
        try:
            check_served(contract, {(op, case, implementation): count for op, case, implementation, count in side["served"]})
        except ContractError as error:
            findings.faults.append(str(error))
    for case in CASES:
        if not cases.get(case, {}).get("inside"):
            findings.voids.append(f"{case}: no call was seen inside an isoexec op: the case did not run, or the audit is blind")
    return findings


def _print(findings: dict[str, Findings], status: int) -> None:
    print(table(CASE_COLUMNS, [row for name, found in findings.items() for row in case_rows(name, found.cases)]))
    strays = [row for name, found in findings.items() for row in stray_rows(name, found.cases)]
    if strays:
        print("\n" + table(STRAY_COLUMNS, strays))
    print()
    for name, found in findings.items():
        for kind, sentences in (("STRAY", found.faults), ("INCONCLUSIVE", found.voids)):
            for sentence in sentences:
                print(f"{kind}: {name}: {sentence}")
    print(f"isoexec audit: {VERDICTS[status]}: {len(strays)} call sites of floating-point ops on the logprob path without an isoexec op")


def _write_json(path: Path, findings: dict[str, Findings], status: int) -> None:
    document = {
        "status": status,
        "verdict": VERDICTS[status],
        "models": {name: {"cases": f.cases, "faults": f.faults, "voids": f.voids} for name, f in findings.items()},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
