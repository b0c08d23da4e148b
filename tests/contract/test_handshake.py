"""What a runtime calls around a weight sync: every process against the contract, and against each other."""

import dataclasses
import functools
import json
import os
import time
from collections import Counter

import pytest
import torch

from isoexec.contract import CONTRACT_VARIABLE, ContractError, ExecutionContract, Numerics
from isoexec.contract.architectures import regions
from isoexec.contract.canonical import bits32
from isoexec.contract.manifest import Manifest
from isoexec.ops._core import registry
from isoexec.ops._core.bits import nudge
from isoexec.ops._core.digest import tensors_digest
from isoexec.ops._core.provider import PROVIDERS_VARIABLE
from isoexec.runtimes import compose, evidence
from isoexec.runtimes.handshake import check_process_served, check_weights, handshake, process_identity

CONTRACT = compose.composed(ExecutionContract("Qwen3_5ForCausalLM", "cpu"))
PLAIN = ExecutionContract("Qwen3_5ForCausalLM", "cpu")


@functools.lru_cache(maxsize=None)
def identity(contract=CONTRACT, temperature=1.0):
    return evidence.identity(contract, "process", settings={"temperature": bits32(temperature)})


def test_processes_that_run_the_contract_shake_hands():
    assert handshake(CONTRACT, {"engine": identity(), "trainer": identity().to_json()}) == []


def test_a_deployment_edit_is_logged():
    other = dataclasses.replace(identity(), deployment=identity().deployment | {"python": "3.12.99"})
    [logged] = handshake(CONTRACT, {"trainer": identity(), "engine": identity(), "engine 1": other})
    assert logged.path == "deployment.python"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_of_many_that_differs_is_named(place):
    edited = json.loads(identity().to_json())
    edited["numerical_policy"]["packages"]["torch"] = "2.11.1"
    names = ["trainer", "engine 0", "engine 1"]
    identities = {name: json.dumps(edited) if i == place else identity() for i, name in enumerate(names)}
    with pytest.raises(ContractError, match=f"packages.torch: .*{names[place]} has \"2.11.1\".*; install the versions") as error:
        handshake(CONTRACT, identities)
    assert "numerical_policy.packages.torch" in str(error.value)


def test_two_processes_that_agree_on_another_contract_are_refused():
    """Equal to each other is not enough: both may have been started with last week's file."""
    other = compose.composed(dataclasses.replace(PLAIN, numerics=Numerics(gdn_chunk=32)))
    with pytest.raises(ContractError, match=r"composition.gdn_core.*gdn_chunk: the contract has .*, engine has .*ISOEXEC_CONTRACT"):
        handshake(CONTRACT, {"engine": identity(other), "trainer": identity(other)})


def test_another_temperature_is_refused():
    """Rows 16 and 17 of the reports: a trainer that scores another distribution than the engine sampled."""
    with pytest.raises(
        ContractError, match='settings.temperature: engine has "0x3f333333", trainer has "0x3f800000"; give both sides the same setting'
    ):
        handshake(CONTRACT, {"engine": identity(temperature=0.7), "trainer": identity()})


def test_a_provider_s_binary_is_read_again_where_it_changed(monkeypatch, tmp_path):
    """A handshake comes before every sync and a binary has 150 MB; an edit that keeps size and time of the last change shows all the same."""
    monkeypatch.setenv(PROVIDERS_VARIABLE, str(tmp_path))
    binary = tmp_path / "flash_attention_3" / "kernels.so"
    binary.parent.mkdir()
    binary.write_bytes(b"0" * 64)
    [target] = {op.implementations["cuda"] for name, op in evidence.declarations().items() if name == "attention.paged"}
    assert evidence.providers([target]) == (first := evidence.providers([target])) and len(first["flash_attention_3"]) == 64
    assert evidence._provider_digest.cache_info().hits >= 1  # the second found nothing changed
    times = binary.stat().st_atime_ns, binary.stat().st_mtime_ns
    time.sleep(0.02)  # a file system's clock has ticks
    binary.write_bytes(b"0" * 63 + b"1")
    os.utime(binary, ns=times)
    assert evidence.providers([target]) != first


@pytest.mark.parametrize("identities", [{}, {"engine": "{}"}])
def test_fewer_than_two_processes_prove_nothing(identities):
    with pytest.raises(ContractError, match="identity|two processes"):
        handshake(CONTRACT, {name: identity() for name in identities})
    with pytest.raises(ContractError, match="the identity"):
        handshake(CONTRACT, {"engine": "{}", "trainer": identity()})


def test_a_process_without_a_contract_has_no_identity(monkeypatch, tmp_path):
    monkeypatch.delenv(CONTRACT_VARIABLE, raising=False)
    with pytest.raises(ContractError, match="ISOEXEC_CONTRACT: not set: the engine runs upstream's kernels"):
        process_identity("engine", tmp_path)


def manifest(**changed):
    tensors = {"layers.0.A_log": torch.ones(4), "layers.0.w": torch.arange(16.0).bfloat16().view(4, 4)} | changed
    return Manifest(tensors_digest({name: tensor for name, tensor in tensors.items() if tensor is not None}))


def test_equal_weights_have_a_version():
    version = check_weights(PLAIN, {"trainer": manifest(), "engine": manifest().data(), "engine 1": json.dumps(manifest().data())})
    assert version == manifest().sha256
    assert version != manifest(**{"layers.0.A_log": nudge(torch.ones(4))}).sha256


@pytest.mark.parametrize("holder", ["trainer", "engine", "engine 1"])
def test_one_stale_process_is_named(holder):
    stale = manifest(**{"layers.0.w": nudge(torch.arange(16.0).bfloat16().view(4, 4), index=7)})
    manifests = {name: stale if name == holder else manifest() for name in ("trainer", "engine", "engine 1")}
    with pytest.raises(ContractError, match="weights.layers.0.w: trainer has .*, engine.* has .*; 1 of 2 tensors differ: sync again"):
        check_weights(PLAIN, manifests)


def test_a_cast_on_both_sides_is_refused():
    """Equal to each other, and both rounded: the dtype is the contract's."""
    cast = manifest(**{"layers.0.A_log": torch.ones(4).bfloat16()})
    with pytest.raises(ContractError, match="weights.layers.0.A_log: dtype: the contract says float32, trainer has bfloat16"):
        check_weights(PLAIN, {"trainer": cast, "engine": cast})


def test_weights_that_nobody_digested_are_refused():
    with pytest.raises(ContractError, match="the manifest of trainer is empty"):
        check_weights(PLAIN, {"trainer": {}, "engine": {}})
    with pytest.raises(ContractError, match="expected the manifests of 'trainer' and of another process"):
        check_weights(PLAIN, {"engine": manifest(), "engine 1": manifest()})
    partial = {name: dict(entry, elements=1) for name, entry in manifest().data().items()}
    with pytest.raises(ContractError, match="digested 1 of 4 elements"):
        check_weights(PLAIN, {"trainer": partial, "engine": partial})


@pytest.fixture
def served(monkeypatch, tmp_path):
    """Counters of a process that has prefilled under CONTRACT: (op, case, implementation) -> calls, to be changed."""
    file = tmp_path / "contract.json"
    file.write_text(CONTRACT.to_json())
    monkeypatch.setenv(CONTRACT_VARIABLE, str(file))
    targets = {op: target for entry in CONTRACT.composition for op, target in entry.implementations if "engine_prefill" in entry.cases}
    called = {op for region in regions(CONTRACT.architecture, "cpr_wy") for op in region.must_serve("engine_prefill")}
    counters = Counter({(op, "engine_prefill", targets[op]): 2 for op in called})
    monkeypatch.setattr(registry, "_served", counters)
    return counters


def test_a_process_that_ran_what_it_declares(served):
    assert check_process_served() == {"engine_prefill": 2 * len(served)}


def test_an_op_that_something_else_computed(served):
    del served["attention.paged", "engine_prefill", "isoexec.ops.attention.reference:paged"]
    with pytest.raises(ContractError, match="op attention.paged, case engine_prefill: declared for region attention, and never called"):
        check_process_served()
    assert check_process_served(whole=False)  # a stage need not hold every layer


def test_an_op_that_nobody_declared(served):
    served["moe.route", "engine_prefill", "isoexec.ops.moe.reference:route"] = 1
    with pytest.raises(ContractError, match="op moe.route, case engine_prefill: called, and not declared for Qwen3_5ForCausalLM"):
        check_process_served()


def test_an_op_that_other_code_served(served):
    served["matmul.linear", "engine_prefill", "elsewhere:linear"] = 1
    with pytest.raises(ContractError, match="op matmul.linear, case engine_prefill: the contract names .*, elsewhere:linear served it"):
        check_process_served()
