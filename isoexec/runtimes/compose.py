"""The composition of this installation: what serves each region of an architecture, pinned by digest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from isoexec.contract import ContractError, Entry, ExecutionContract, differences, sha256_hex
from isoexec.contract.architectures import REGIONS, Region, regions
from isoexec.contract.canonical import bits32
from isoexec.contract.identity import refusal
from isoexec.contract.types import SCHEDULE_VERSION
from isoexec.ops._core import provider
from isoexec.runtimes import evidence


class Proof(NamedTuple):
    """What stands behind a region.

    Attributes:
        cpu, cuda: tests that each implementation passes, by backend.
        constants: contract constants (names of ``numerics``) that the region reads.
        discharge: how cases that call different ops are known to agree: ``"twin"`` or ``"equivalence"``.
        shown_by: (CPU test, GPU test) of it.
    """

    cpu: tuple[str, ...]
    cuda: tuple[str, ...]
    constants: tuple[str, ...] = ()
    discharge: str = "same"
    shown_by: tuple[str, str] = ("", "")


_MATMUL = Proof(("tests/ops/test_matmul_cpu.py",), ("tests/gpu/test_matmul.py",))
_COLLECTIVE = ("tests/ops/test_tensor_parallel_cpu.py",)
_ELEMENTWISE = ("tests/gpu/test_elementwise.py",)
_MOE = ("tests/gpu/test_moe.py",)
PROOFS = {
    "embedding": Proof(("tests/ops/test_embedding_cpu.py",), _ELEMENTWISE),
    "rope_table": Proof(("tests/ops/test_rope_cpu.py",), _ELEMENTWISE),
    "rope": Proof(("tests/ops/test_rope_cpu.py",), _ELEMENTWISE),
    "activation": Proof(("tests/ops/test_activation_cpu.py",), _ELEMENTWISE),
    "norm": Proof(("tests/ops/test_norm_cpu.py",), ("tests/gpu/test_norm.py",)),
    "linear": _MATMUL,
    "lm_head": _MATMUL,
    "row_parallel_linear": _MATMUL._replace(constants=("row_leaves",)),
    "collective": Proof(_COLLECTIVE, _COLLECTIVE),
    "attention": Proof(
        ("tests/ops/test_attention_cpu.py",), ("tests/gpu/test_attention.py",), ("kv_block",), "equivalence",
        ("tests/ops/test_attention_cpu.py::test_paged_equals_packed_in_any_split",
         "tests/gpu/test_attention.py::test_every_case_has_the_same_bits"),
    ),
    "logprob": Proof(
        ("tests/ops/test_logprob_cpu.py",), ("tests/gpu/test_logprob.py",), ("vocab_block",), "twin",
        ("tests/ops/test_logprob_cpu.py::test_the_token_has_the_bits_of_its_row",
         "tests/gpu/test_logprob.py::test_token_is_the_entry_of_the_row"),
    ),
    "sampling": Proof(("tests/ops/test_sampling_cpu.py",), ("tests/gpu/test_sampling.py",)),
    "gdn_edges": Proof(("tests/gdn/test_edges_cpu.py",), ("tests/gdn/test_gpu.py",)),
    "gdn_conv": Proof(
        ("tests/gdn/test_edges_cpu.py",), ("tests/gdn/test_gpu.py",), (), "twin",
        ("tests/gdn/test_edges_cpu.py::test_conv_steps_equal_sequence", "tests/gdn/test_gpu.py::test_gate"),
    ),
    "gdn_core.cpr_wy": Proof(
        ("tests/gdn/test_core_cpu.py",), ("tests/gdn/test_gpu.py",), ("gdn_chunk",), "equivalence",
        ("tests/gdn/test_core_cpu.py::test_single_steps_equal_one_shot", "tests/gdn/test_gpu.py::test_gate"),
    ),
    "gdn_core.cpr": Proof(
        ("tests/gdn/test_cpr_cpu.py",), ("tests/gdn/test_gpu.py",), ("gdn_chunk",), "equivalence",
        ("tests/gdn/test_cpr_cpu.py::test_single_steps_equal_one_shot", "tests/gdn/test_gpu.py::test_gate"),
    ),
    "router": Proof(("tests/moe/test_router.py",), _MOE),
    "experts": Proof(("tests/moe/test_experts.py", "tests/moe/test_combine.py"), _MOE, ("combine_groups",)),
}  # fmt: skip

#: Form of the Gated DeltaNet core -> chunk sizes that have passed its gates on a GPU (tests/gdn/gates.py).
GPU_CHUNKS = {"cpr": (16, 64), "cpr_wy": (16, 32)}

#: Constants that the schedule fixes, by region.
_FIXED = {"gdn_edges": {"l2norm_epsilon": bits32(1e-6), "softplus_threshold": bits32(20.0)}}


def composed(contract: ExecutionContract, architecture: str | None = None) -> ExecutionContract:
    """``contract`` with the composition of this installation.

    Args:
        contract: of an architecture whose regions are known.
        architecture: device architecture of entries that are proven on one only; that of this machine where it is left out.

    Raises:
        ContractError: ops have no implementation for the backend; names all of them.
    """
    entries, missing = available(contract, architecture)
    if missing:
        named = "; ".join(f"{', '.join(ops)} (region {region})" for region, ops in missing.items())
        raise ContractError(
            f"backend {contract.backend}: no implementation of {named}: {contract.architecture} cannot be composed on it yet; use a "
            "backend that has them all, or add them to isoexec/ops"
        )
    return dataclasses.replace(contract, composition=tuple(entries))


def available(contract: ExecutionContract, architecture: str | None = None) -> tuple[list[Entry], dict[str, list[str]]]:
    """What of a composition this installation has: (entries, region -> ops that the backend lacks).

    Args:
        contract, architecture: as in :func:`composed`.

    Raises:
        ContractError: the architecture of the model is not known.
    """
    if contract.architecture not in REGIONS:
        raise ContractError(
            f"architecture: expected one of {', '.join(REGIONS)}, found {contract.architecture!r}; only these can be composed"
        )
    device = architecture or ("any" if contract.backend == "cpu" else evidence.architecture_of(contract.backend))
    known, entries, missing = evidence.declarations(), [], {}
    for region in regions(contract.architecture, contract.numerics.gdn_form):
        needed = sorted({*region.trainer, *region.prefill, *region.decode})
        lacking = [op for op in needed if op not in known or contract.backend not in known[op].implementations]
        if lacking:
            missing[region.name] = lacking
        else:
            entries += _entries(contract, region, device)
    return entries, missing


def check_installed(contract: ExecutionContract) -> None:
    """Refuse an installation whose ops are not those that the contract pins; one without a composition pins none.

    Raises:
        ContractError: names the first entry that differs, both values and what to do.
    """
    if not contract.composition:
        return
    device = next((entry.architecture for entry in contract.composition if entry.architecture != "any"), None)
    here = composed(contract, device)
    found = differences(contract.data()["composition"], here.data()["composition"], "numerical_policy.ops.composition")
    if found:
        raise ContractError(refusal("the contract", "this installation", found).replace("numerical_policy.ops.", "", 1))
    if device is not None and (present := evidence.architecture_of(contract.backend)) != device:
        raise ContractError(f"device: the contract is for {device}, this process computes on {present}; build a contract on this device")
    targets = {target for entry in contract.composition for _, target in entry.implementations}
    for name in sorted({name for target in targets for name in evidence.providers_of(target)}):
        provider.provided(name)  # refuses a binary that is absent or another


def _entries(contract: ExecutionContract, region: Region, device: str) -> list[Entry]:
    """One entry for every set of ops that cases of the region call."""
    known, numerics = evidence.declarations(), dataclasses.asdict(contract.numerics)
    form, chunk = numerics["gdn_form"], numerics["gdn_chunk"]
    if region.name == "gdn_core" and contract.backend == "cuda" and chunk not in GPU_CHUNKS[form]:
        proven = " or ".join(map(str, GPU_CHUNKS[form]))
        raise ContractError(
            f"numerics.gdn_chunk: {chunk} has not passed the gates of the form {form} on a GPU; expected {proven}, or a gate of it"
        )
    proof = PROOFS[f"gdn_core.{form}" if region.name == "gdn_core" else region.name]
    groups: dict[tuple[str, ...], list[str]] = {}
    for case in region.cases:
        groups.setdefault(region.ops(case), []).append(case)
    constants = {name: f"0x{numerics[name]:08x}" for name in proof.constants} | _FIXED.get(region.name, {})
    alone = len(groups) == 1
    on_gpu = contract.backend == "cuda"
    entries = []
    for ops, cases in groups.items():
        targets = {
            op: known[op].implementations[contract.backend] for op in region.optional if contract.backend in known[op].implementations
        }
        targets |= {op: known[op].implementations[contract.backend] for op in ops}
        binaries = sorted({name for target in targets.values() for name in evidence.providers_of(target)})
        pinned = [provider.PROVIDERS[name] for name in binaries]
        entries.append(
            Entry(
                region=region.name,
                cases=tuple(cases),
                implementations=tuple(targets.items()),
                version="; ".join([f"schedule {SCHEDULE_VERSION}", *(f"{p.name} {p.version}" for p in pinned)]),
                architecture=device if pinned else "any",
                constants=tuple(constants.items()),
                artifact=sha256_hex(
                    {
                        "sources": {op: evidence.source_digest(target) for op, target in targets.items()},
                        "providers": {p.name: p.sha256 for p in pinned},
                    }
                ),
                gates=proof.cuda if on_gpu else proof.cpu,
                discharge="same" if alone else proof.discharge,
                discharged_by="" if alone else proof.shown_by[on_gpu],
            )
        )
    return entries


def missing_gates(contract: ExecutionContract, root: Path) -> list[str]:
    """Tests that the composition names and that are not below ``root``, the project's folder."""
    named = {gate for entry in contract.composition for gate in (*entry.gates, *filter(None, [entry.discharged_by]))}
    missing = []
    for gate in sorted(named):
        file, _, function = gate.partition("::")
        path = root / file
        if not path.is_file() or (function and f"def {function}(" not in path.read_text(encoding="utf-8")):
            missing.append(gate)
    return missing
