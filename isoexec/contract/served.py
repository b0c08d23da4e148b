"""What has run, held against what the contract declares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from isoexec.contract.architectures import CASES, REGIONS
from isoexec.contract.architectures import regions as regions_of
from isoexec.contract.errors import ContractError
from isoexec.contract.types import ExecutionContract


def check_served(contract: ExecutionContract, served: Mapping[tuple[str, str | None, str], int], *, whole: bool = True) -> None:
    """Refuse a process in which an op ran undeclared, did not run, or ran other code than declared.

    Cases that have not been executed are not judged; neither are ops outside every case.

    Args:
        contract: of the process.
        served: calls so far by (op, case, implementation), from the op registry.
        whole: whether the process holds the whole model; a pipeline stage does not run what other stages hold.

    Raises:
        ContractError: names the op, the case, what was expected, what was found and what to do.
    """
    regions = regions_of(contract.architecture, contract.numerics.gdn_form)
    if not regions:
        raise ContractError(f"architecture: no regions are known for {contract.architecture}; expected one of {', '.join(REGIONS)}")
    ran: dict[str, dict[str, set[str]]] = {case: {} for case in CASES}
    for (op, case, implementation), calls in served.items():
        if case is not None and calls:
            ran.setdefault(case, {}).setdefault(op, set()).add(implementation)
    for case, ops in ran.items():
        if not ops:
            continue
        for region in regions:
            for op in region.must_serve(case) if whole else ():
                if op not in ops:
                    raise ContractError(
                        f"op {op}, case {case}: declared for region {region.name}, and never called: something else computed it; "
                        "is the tree built with all patches? see make patches-check"
                    )
        declared = {op for region in regions if region.ops(case) for op in (*region.ops(case), *region.optional)}
        for op in sorted(ops):
            if op not in declared:
                raise ContractError(
                    f"op {op}, case {case}: called, and not declared for {contract.architecture}; add it to a region of "
                    "isoexec/contract/architectures.py with its gates"
                )
        _check_implementations(contract, case, ops)


def _check_implementations(contract: ExecutionContract, case: str, ops: Mapping[str, Iterable[str]]) -> None:
    expected = {op: target for entry in contract.composition if case in entry.cases for op, target in entry.implementations}
    for op, found in ops.items():
        for implementation in sorted(found):
            if op in expected and implementation != expected[op]:
                raise ContractError(
                    f"op {op}, case {case}: the contract names {expected[op]}, {implementation} served it; there is no fallback: build the "
                    "contract for this backend, or install the release it was built with"
                )
