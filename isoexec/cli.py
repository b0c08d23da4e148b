"""The ``isoexec`` command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from isoexec.contract import ContractError, ExecutionContract, contract_for_model
from isoexec.contract.types import BACKENDS


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status. Bad input is one line on stderr and status 2."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ContractError, OSError) as error:
        print(f"isoexec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("isoexec: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="isoexec", description="One policy, executed by rollout engine and trainer in the same bits.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verify = verbs.add_parser("verify", help="compare the logprobs of vLLM and Megatron, bit for bit")
    verify.add_argument("--model", metavar="FOLDER", help="HF-format checkpoint (default: a small random one is made)")
    verify.add_argument("--full", action="store_true", help="the whole matrix of settings")
    verify.add_argument("--out", default="out", metavar="FOLDER", help="for verify.json, verify.png and logs/ (default: out)")
    verify.add_argument("--prompts", type=int, metavar="N", help="at most N prompts (a large model on a small machine)")
    verify.add_argument("--tokens", type=int, metavar="N", help="at most N new tokens for each prompt")
    verify.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="longest wait for one answer of a process")
    verify.add_argument(
        "--plant-ulp", action="store_true", help="self-test: move one weight of the trainer's copy by one ulp; exit status 1 is expected"
    )
    verify.set_defaults(run=_verify)

    contract = verbs.add_parser("contract", help="build or show a contract").add_subparsers(required=True, metavar="VERB")
    show = contract.add_parser("show", help="validate a contract and print it with its digest")
    show.add_argument("file", type=Path)
    show.set_defaults(run=_contract_show)
    build = contract.add_parser("build", help="write the contract of a checkpoint")
    build.add_argument("--model", required=True, metavar="FOLDER", help="HF-format checkpoint")
    build.add_argument("--backend", required=True, choices=BACKENDS)
    build.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    build.set_defaults(run=_contract_build)
    return parser


def _verify(options) -> int:
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
        )
    )


def _contract_show(options) -> int:
    contract = ExecutionContract.from_json(options.file.read_text(encoding="utf-8"))
    print(json.dumps(json.loads(contract.to_json()), indent=2))
    for name, digest in contract.identities.items():
        print(f"{name} {digest}")
    print(f"sha256 {contract.digest}")
    return 0


def _contract_build(options) -> int:
    contract = contract_for_model(options.model, options.backend)
    temporary = options.output.with_name(options.output.name + ".part")
    temporary.write_text(contract.to_json() + "\n", encoding="utf-8")
    os.replace(temporary, options.output)
    print(f"{options.output}: {contract.architecture}, {contract.backend}, sha256 {contract.digest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
