"""The ``isoexec`` command."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path

from isoexec.contract import (
    CASES,
    CONTRACT_VARIABLE,
    ContractError,
    ExecutionContract,
    Identity,
    active_contract,
    contract_for_model,
    differences,
    model_digest,
    read_config,
    sha256_hex,
)
from isoexec.contract.architectures import REGIONS
from isoexec.contract.canonical import LARGEST_TEXT, parse_json, printable
from isoexec.contract.identity import PARTS, advice
from isoexec.contract.types import BACKENDS, GDN_CHUNKS, GDN_FORMS, Claims
from isoexec.verify.arguments import check_limits, check_model, check_numerics, dtype_note, positive
from isoexec.verify.folder import check_free
from isoexec.verify.trace.command import add_verbs as add_trace_verbs


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status. Bad input is one line on stderr and status 2."""
    options = _options(arguments)
    try:
        return options.run(options)
    except (ContractError, OSError) as error:
        print(f"isoexec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("isoexec: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # status 1 is a verdict (something differs); a fault of ours must not look like one
        traceback.print_exc()
        print(f"isoexec: {type(error).__name__}: {error}; this is a fault of isoexec, nothing was concluded", file=sys.stderr)
        return 3


def _options(arguments: list[str] | None):
    """Options of the command line. Words of a verb that takes any may stand before, between and after its options."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)
    if more and ("words" not in options or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        options.words += more
    return options


_TRAIN = """\
recipes: tiny (the default) and tiny-dense run on two CPU cores, gpu on one GPU, node on eight, nodes on several nodes of eight

  isoexec train tiny trainer.max_training_steps=5 isoexec.out=out/first
  isoexec train tiny --cfg job                                             every key and its value
  isoexec train tiny trainer.resume_mode=latest                            go on from the last checkpoint

isoexec.out (out/dapo) gets steps.jsonl, summary.md, tensorboard/, checkpoints/ and logs/. docs/training.md tells the rest.

exit status: 0 done, 1 a token's bits differed, 2 bad input, 3 a fault of isoexec, 4 a process or the disk was lost; it can be resumed
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="isoexec", description="One policy, executed by rollout engine and trainer in the same bits.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verify = verbs.add_parser(
        "verify",
        help="compare the logprobs of vLLM and Megatron, bit for bit",
        description="Exit status: 0 all bits equal, 1 some token differs, 2 refused (bad input, or processes that do not agree on what they "
        "run), 3 inconclusive (a process died, or a setting did not do what it claims).",
    )
    verify.add_argument("--model", metavar="FOLDER", help="HF-format checkpoint (default: a small random one is made)")
    verify.add_argument("--full", action="store_true", help="the whole matrix of settings")
    verify.add_argument("--out", default="out", metavar="FOLDER", help="for verify.json, verify.png and logs/ (default: out)")
    verify.add_argument("--prompts", type=int, metavar="N", help="at most N prompts, 16 or more (a large model on a small machine)")
    verify.add_argument("--tokens", type=int, metavar="N", help="at most N new tokens for each prompt, 8 or more")
    verify.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="longest wait for one answer of a process")
    verify.add_argument(
        "--plant-ulp", action="store_true", help="self-test: move one weight of the trainer's copy by one ulp; exit status 1 is expected"
    )
    verify.add_argument("--cuda-graphs", action="store_true", help="capture the engine's decode steps, on a GPU")
    verify.add_argument("--engine-tp", type=int, default=1, metavar="N", help="ranks of the engine under the contract, which share out experts too")
    verify.add_argument("--no-native", dest="native", action="store_false", help="leave out upstream's own kernels, which prove nothing")
    _add_numerics(verify)
    verify.set_defaults(run=_verify)

    audit = verbs.add_parser(
        "audit",
        help="list floating-point ops on the logprob path that no isoexec op issued",
        description="Exit status: 0 clean, 1 stray ops, 2 bad input, 3 inconclusive (docs/audit.md).",
    )
    audit.add_argument("--model", metavar="FOLDER", help="HF-format checkpoint (default: a small random one of every architecture)")
    audit.add_argument("--json", metavar="FILE", help="also write everything that was found as JSON")
    audit.add_argument("--timeout", type=positive, default=600.0, metavar="SECONDS", help="longest wait for one answer of a process")
    audit.set_defaults(run=_audit)

    trace = verbs.add_parser("trace", help="find the first different bit of two runtimes, and why")
    add_trace_verbs(trace, argparse.RawDescriptionHelpFormatter)

    train = verbs.add_parser(
        "train",
        help="run a recipe: rollouts by vLLM, updates by Megatron, through SkyRL",
        description="Train a policy by reinforcement learning: rollouts by vLLM, updates by Megatron, through SkyRL. Each token's two\n"
        "logprobs are compared, over bit patterns; one that differs stops the run.",
        epilog=_TRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("words", nargs="*", metavar="[RECIPE] KEY=VALUE", help="recipe (default: tiny), then overrides in Hydra's grammar")
    train.add_argument("--arm", choices=("isoexec", "native"), help="native: the same recipe with no contract")
    train.add_argument("--compare", action="store_true", help="both arms with one seed, one after the other")
    train.add_argument("--cfg", choices=("job",), help="print the composed configuration and end")
    train.set_defaults(run=_train)

    _add_contract(
        verbs.add_parser(
            "contract",
            help="build, show, compare or check a contract",
            description="Exit status: 0 all right, 1 something differs, 2 bad input (docs/contract.md).",
        ).add_subparsers(required=True, metavar="VERB")
    )
    return parser


def _add_contract(contract) -> None:
    """Exit statuses of these verbs: 0 all right, 1 something differs, 2 bad input (docs/contract.md)."""
    build = contract.add_parser("build", help="write the contract of a checkpoint")
    build.add_argument("--model", required=True, metavar="FOLDER", help="HF-format checkpoint")
    build.add_argument("--backend", required=True, choices=BACKENDS)
    build.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    build.add_argument("--device", metavar="ARCH", help="device architecture, e.g. sm_90 (default: this machine's)")
    _add_numerics(build)
    build.add_argument(
        "--claim", action="append", default=[], metavar="NAME=N",
        help="a parallel degree that the contract covers, e.g. trainer_tp=2 (default: 1 each; may be given several times)",
    )  # fmt: skip
    build.add_argument(
        "--no-composition", action="store_true", help="pin no implementation; the processes are compared with each other only"
    )
    show = contract.add_parser("show", help="validate a contract and print it with its digests")
    show.add_argument("file", type=Path)
    diff = contract.add_parser("diff", help="compare two contracts, or two identities that `status --json` wrote")
    diff.add_argument("first", type=Path)
    diff.add_argument("second", type=Path)
    check = contract.add_parser("check", help="whether this installation runs what a contract names")
    check.add_argument("file", type=Path)
    check.add_argument("--model", metavar="FOLDER", help="also check that the contract is this checkpoint's")
    status = contract.add_parser("status", help="what a process started here would run, as evidence")
    status.add_argument("file", type=Path, nargs="?", help=f"contract (default: that of {CONTRACT_VARIABLE})")
    status.add_argument("--live", action="store_true", help="of all processes under a contract on this machine, and whether they agree")
    for name, run in (
        ("build", _contract_build),
        ("show", _contract_show),
        ("diff", _contract_diff),
        ("check", _contract_check),
        ("status", _contract_status),
    ):
        verb = contract.choices[name]
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(run=run)


def _add_numerics(parser) -> None:
    parser.add_argument("--gdn-form", choices=GDN_FORMS, help="form of the Gated DeltaNet core (docs/gdn.md)")
    parser.add_argument("--gdn-chunk", type=int, metavar="C", help=f"tokens of a Gated DeltaNet chunk, one of {GDN_CHUNKS}")


def _numerics(options) -> dict:
    """Constants that the command line names."""
    return {name: value for name in ("gdn_form", "gdn_chunk") if (value := getattr(options, name)) is not None}


def _checked_model(folder: str | None) -> dict | None:
    """Config of the model that the command line names, if it names one."""
    if folder is None:
        return None
    config = check_model(folder)
    if note := dtype_note(config):
        print(f"isoexec: note: {note}", file=sys.stderr)
    return config


def _verify(options) -> int:
    check_limits(options.prompts, options.tokens)
    check_numerics(_numerics(options), _checked_model(options.model))
    check_free(Path(options.out))
    from isoexec.verify.run import make_options, verify

    return verify(
        make_options(
            options.model,
            options.out,
            full=options.full,
            plant=options.plant_ulp,
            timeout=options.timeout,
            prompts=options.prompts,
            tokens=options.tokens,
            numerics=_numerics(options),
            native=options.native,
            cuda_graphs=options.cuda_graphs,
            engine_tp=options.engine_tp,
        )
    )


def _audit(options) -> int:
    _checked_model(options.model)
    from isoexec.verify.audit.run import audit

    return audit(options.model, options.json, options.timeout)


def _contract_show(options) -> int:
    contract = _read_contract(options.file)
    if options.json:
        _print_json({"contract": contract.data(), "identities": contract.identities, "sha256": contract.digest})
        return 0
    data = contract.data()
    rows = [(name, _cell(data[name])) for name in ("architecture", "backend", "model", "schema_version", "schedule_version")]
    for part in ("numerics", "claims", "logprobs", "dtypes", "obligations", "deployment"):
        rows += [(f"{part}.{name}", _cell(value)) for name, value in sorted(data[part].items())]
    rows.append(("refused", ", ".join(contract.refused)))
    _print_rows(rows)
    if contract.composition:
        print()
        _print_rows([("region", "cases", "implementation", "artifact", "discharge"), *map(_entry_row, contract.composition)])
    print()
    _print_rows([*contract.identities.items(), ("sha256", contract.digest)])
    return 0


def _train(options) -> int:
    from isoexec.train import launch

    names = [word for word in options.words if not set("=~+") & set(word)]
    if len(names) > 1:
        raise ContractError(f"expected one recipe, found {', '.join(names)}; an override is KEY=VALUE")
    recipe = names[0] if names else launch.DEFAULT
    overrides = [word for word in options.words if word not in names] + ([f"isoexec.arm={options.arm}"] if options.arm else [])
    if options.cfg and options.compare:
        raise ContractError("--cfg job --compare: expected one of the two; an arm's configuration is --cfg job --arm NAME")
    if options.cfg:
        launch.show(recipe, overrides)
        return 0
    return launch.compare(recipe, overrides) if options.compare else launch.train(recipe, overrides)


def _contract_build(options) -> int:
    if options.output.is_dir() or not options.output.parent.is_dir():
        raise ContractError(f"-o {options.output}: expected a file in a folder that exists")
    check_numerics(_numerics(options), read_config(options.model))
    contract = contract_for_model(options.model, options.backend, **_numerics(options))
    contract = dataclasses.replace(contract, claims=_claims(options.claim))
    if not options.no_composition:
        from isoexec.runtimes import compose

        entries, missing = compose.available(contract, options.device)
        if missing:
            return _report_missing(options, entries, missing)
        contract = dataclasses.replace(contract, composition=tuple(entries))
    temporary = options.output.with_name(options.output.name + ".part")
    temporary.write_text(contract.to_json() + "\n", encoding="utf-8")
    os.replace(temporary, options.output)
    if options.json:
        _print_json({"file": str(options.output), "identities": contract.identities, "sha256": contract.digest})
    else:
        print(f"{options.output}: {contract.architecture}, {contract.backend}, sha256 {contract.digest}")
    return 0


def _claims(words: list[str]) -> Claims:
    """Claims of ``NAME=N`` words; what is not named is 1, or off.

    Raises:
        ContractError: no claim of that name, or no value of it.
    """
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Claims)}
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        switch = kinds.get(name) is bool
        if name not in kinds or not (value in ("true", "false") if switch else value.isdecimal() and len(value) < 8):
            raise ContractError(f"--claim {word}: expected NAME=N with one of {', '.join(kinds)} (..._sp=true)")
        found[name] = value == "true" if switch else int(value)
    return Claims(**found)


def _report_missing(options, entries, missing: dict[str, list[str]]) -> int:
    """What could be composed, and what the backend lacks; no file is written, since a contract leaves no op open."""
    if options.json:
        _print_json({"composed": [entry.data() for entry in entries], "missing": missing})
    else:
        _print_rows([("region", "cases", "implementation", "artifact", "discharge"), *map(_entry_row, entries)])
        for region, ops in missing.items():
            print(f"MISSING: {region}: {', '.join(ops)}: no {options.backend} implementation")
    regions = len({entry.region for entry in entries})
    count = f"{regions} of {regions + len(missing)} regions"
    print(f"isoexec: {count} can be composed on {options.backend}; no contract written", file=sys.stderr)
    return 2


def _contract_diff(options) -> int:
    first, second = (_read_parts(file) for file in (options.first, options.second))
    refused = [d for part in PARTS[:2] for d in differences(first[part], second[part], part)]
    logged = differences(first["deployment"], second["deployment"], "deployment")
    if options.json:
        _print_json({"refused": [d.__dict__ | {"advice": advice(d.path)} for d in refused], "logged": [d.__dict__ for d in logged]})
    else:
        for kind, found in (("DIFFERENT", refused), ("neutral", logged)):
            for d in found:
                print(printable(f"{kind}: {d}") + (f"; {advice(d.path)}" if kind == "DIFFERENT" else ""))
        if not refused:
            print("the same model and the same bits" + (f"; {len(logged)} neutral entries differ" if logged else ""))
    return 1 if refused else 0


def _contract_check(options) -> int:
    contract = _read_contract(options.file)
    config = read_config(options.model) if options.model else None
    from isoexec.runtimes import compose, evidence

    refusal = None
    try:
        if contract.architecture not in REGIONS:
            raise ContractError(f"architecture: expected one of {', '.join(REGIONS)}, found {contract.architecture}; no runtime runs it")
        if config is not None:
            evidence.check_model(contract, model_digest(config))
        compose.check_installed(contract)
    except ContractError as error:
        refusal = str(error)
    if options.json:
        _print_json({"ok": refusal is None, "refusal": refusal, "pinned_entries": len(contract.composition)})
    elif refusal:
        print(f"DIFFERENT: {refusal}")
    else:
        print(f"{options.file}: this installation runs what the contract names ({len(contract.composition)} entries pinned)")
    return 1 if refusal else 0


def _contract_status(options) -> int:
    if options.live:
        return _live_status(options)
    contract = _read_contract(options.file) if options.file else active_contract()
    if contract is None:
        raise ContractError(f"{CONTRACT_VARIABLE} is not set and no file is named: a process started here runs upstream's kernels")
    from isoexec.runtimes import evidence

    found = evidence.identity(contract, "process")
    if options.json:
        print(found.to_json())
        return 0
    policy = {name: part for name, part in found.numerical_policy.items() if name not in ("contract", "ops")}
    rows = [(f"{name}.{key}", str(value)) for name, part in policy.items() for key, value in sorted(part.items())]
    rows += [(f"ops.{op}", f"{entry['implementation']} {entry['sources'][:16]}") for op, entry in found.numerical_policy["ops"].items()]
    _print_rows([("contract", contract.digest), *rows, *found.digests.items()])
    return 0


def _live_status(options) -> int:
    """Exit status 1 if two processes under the same contract differ in what can move a bit."""
    from isoexec.runtimes import live

    found = live.processes()
    groups: dict[str, list] = {}
    for process in found:
        groups.setdefault(sha256_hex(process.identity.numerical_policy.get("contract")), []).append(process)
    refused = [
        f"process {first.pid} and process {other.pid}: {d}; {advice(d.path)}"
        for first, *others in groups.values()
        for other in others
        for part in PARTS[:2]
        for d in differences(getattr(first.identity, part), getattr(other.identity, part), part)
    ]
    if options.json:
        listed = [{"pid": p.pid, "seconds": round(p.age), "identity": p.identity.__dict__, "served": p.served} for p in found]
        _print_json({"processes": listed, "refused": refused})
        return 1 if refused else 0
    rows = [("process", "role", "since", "architecture", "contract", "numerical_policy", "ops served")]
    for name, group in groups.items():
        for p in group:
            architecture, policy = p.identity.semantic.get("architecture"), p.identity.digests["numerical_policy"]
            rows.append(
                (str(p.pid), p.identity.role, f"{p.age:.0f} s", str(architecture), name[:12], policy[:12], _served_by_case(p.served))
            )
    _print_rows(rows)
    for line in refused:
        print(f"DIFFERENT: {line}")
    return 1 if refused else 0


def _served_by_case(served: list[list] | None) -> str:
    """Calls of ops by case, in words."""
    if served is None:
        return "no answer"
    calls: dict[str, int] = {}
    for _, case, _, count in served:
        calls[case or "no case"] = calls.get(case or "no case", 0) + count
    return ", ".join(f"{case} {count}" for case, count in sorted(calls.items())) or "none yet"


def _read_contract(file: Path) -> ExecutionContract:
    try:
        return ExecutionContract.from_json(_read(file))
    except ContractError as error:
        raise ContractError(f"{file}: {error}") from None


def _read_parts(file: Path) -> dict:
    """semantic, numerical_policy and deployment of a contract or of an identity."""
    try:
        text = _read(file)
        value = parse_json(text, "the file")
        if isinstance(value, dict) and "role" in value:
            return Identity.from_json(text).__dict__
        return ExecutionContract.from_json(text).parts()
    except ContractError as error:
        raise ContractError(f"{file}: {error}") from None


def _read(file: Path) -> str:
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read(LARGEST_TEXT + 1)
    except UnicodeDecodeError as error:
        raise ContractError(f"not UTF-8 text: {error}") from None


def _entry_row(entry) -> tuple[str, ...]:
    modules = sorted({target.partition(":")[0].removeprefix("isoexec.ops.") for _, target in entry.implementations})
    cases = "all" if entry.cases == CASES else ", ".join(entry.cases)
    return entry.region, cases, ", ".join(modules), entry.artifact[:12], entry.discharge


def _cell(value) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value) or "any"


def _print_rows(rows) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(printable("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()))


def _print_json(value) -> None:
    print(json.dumps(value, indent=2, sort_keys=True))


if __name__ == "__main__":
    raise SystemExit(main())
