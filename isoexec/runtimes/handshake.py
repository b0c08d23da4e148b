"""What a runtime calls before and after each weight sync: processes that need not compute the same bits are refused.

Framework-free: the caller fetches what each process says of itself (:func:`isoexec.runtimes.evidence.identity`, a weight manifest), over
whatever transport it has, and hands it in by the process's name.
"""

from __future__ import annotations

from collections.abc import Mapping

from isoexec.contract import (
    CONTRACT_VARIABLE,
    ContractError,
    Difference,
    ExecutionContract,
    Identity,
    active_contract,
    check_served,
    differences,
    model_digest,
    read_config,
)
from isoexec.contract.identity import handshake as compare
from isoexec.contract.identity import refusal
from isoexec.contract.manifest import Manifest, check_dtypes, check_synced
from isoexec.ops._core import registry
from isoexec.runtimes import evidence


def process_identity(role: str, model, settings: Mapping[str, str] | None = None) -> Identity:
    """Identity of this process, computed now, under its active contract.

    Args:
        role: ``"engine"`` or ``"trainer"``.
        model: folder of the checkpoint that it opened.
        settings: what this process was told beside the contract and must share with the others, by name, e.g. the bit pattern of the
            temperature that it samples at, or scores at.

    Raises:
        ContractError: no contract is active, or the installation or the checkpoint is not the contract's.
    """
    contract = active_contract()
    if contract is None:
        raise ContractError(f"{CONTRACT_VARIABLE}: not set: the {role} runs upstream's kernels; set it in every process")
    return evidence.identity(contract, role, model=model_digest(read_config(model)), settings=settings)


def check_process_served(*, whole: bool = True) -> dict[str, int]:
    """Refuse this process if, since it started, an op of its contract's model ran undeclared, did not run, or ran other code.

    For a process that holds one model for its life. Call it between steps: a case that has begun must have called all its ops.

    Args:
        whole: whether the process holds the whole model, or a pipeline stage.

    Returns:
        Calls by case.

    Raises:
        ContractError: names the op, the case, what was expected, what was found and what to do.
    """
    served = registry.served()
    contract = active_contract()
    if contract is not None:
        check_served(contract, served, whole=whole)
    calls: dict[str, int] = {}
    for (_, case, _), count in served.items():
        calls[str(case)] = calls.get(str(case), 0) + count
    return calls


def handshake(contract: ExecutionContract, identities: Mapping[str, Identity | str]) -> list[Difference]:
    """Refuse processes that do not run ``contract``, or that differ from each other in anything that can move a bit.

    Call it before every weight sync, with identities taken then: a process can change while it runs.

    Args:
        contract: of the run.
        identities: of every process, by its name (``"engine"``, ``"trainer"``, ``"engine 1"``); an object, or its JSON text.

    Returns:
        Differences of deployments, from the first process's, to be logged.

    Raises:
        ContractError: names the first entry that differs, both values and what to do.
    """
    found = {name: identity if isinstance(identity, Identity) else Identity.from_json(identity) for name, identity in identities.items()}
    if len(found) < 2:
        raise ContractError(f"handshake: expected the identities of two processes or more, found {sorted(found)}; ask each of them")
    for name, identity in found.items():
        _check_contract(contract, name, identity)
    (first, ours), *others = found.items()
    logged = []
    for name, theirs in others:
        logged += compare(_named(first, ours), _named(name, theirs))
    return logged


def check_weights(contract: ExecutionContract, manifests: Mapping[str, Manifest | dict | str], source: str = "trainer") -> str:
    """Refuse a process whose weights are not those of ``source``, or not of the contract's dtypes.

    Call it after every weight sync and before anything is sampled.

    Args:
        contract: of the run.
        manifests: of every process, by its name; an object, what its ``data()`` gave, or the JSON text of that.
        source: the process that the weights come from.

    Returns:
        The weight version: sha256 of the manifest.

    Raises:
        ContractError: names the first tensor that differs, both values and what to do.
    """
    found = {name: manifest if isinstance(manifest, Manifest) else Manifest.from_data(manifest) for name, manifest in manifests.items()}
    if source not in found or len(found) < 2:
        raise ContractError(f"weights: expected the manifests of {source!r} and of another process, found {sorted(found)}; ask each")
    for name, manifest in found.items():
        if not manifest.tensors:
            raise ContractError(f"weights: the manifest of {name} is empty; nothing was digested, so nothing is known of its weights")
        manifest.check_complete()
        check_dtypes(contract, manifest, holder=name)
    for name in found.keys() - {source}:
        check_synced(found[source], found[name], source=source, target=name)
    return found[source].sha256


def _check_contract(contract: ExecutionContract, name: str, identity: Identity) -> None:
    parts = contract.parts()
    semantic = {"architecture": contract.architecture, "model": contract.model or identity.semantic.get("model")}
    wrong = differences(semantic, identity.semantic, "semantic")
    wrong += differences(parts["numerical_policy"], identity.numerical_policy.get("contract"), "numerical_policy.contract")
    if wrong:
        raise ContractError(refusal("the contract", name, wrong))


def _named(name: str, identity: Identity) -> Identity:
    return Identity(name, identity.semantic, identity.numerical_policy, identity.deployment)
