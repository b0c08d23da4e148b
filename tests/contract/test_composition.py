"""Rules of a composition, one message each; what has run against what is declared; gates that exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from isoexec.contract import ContractError, Entry, ExecutionContract, Numerics, check_served
from isoexec.contract.architectures import REGIONS
from isoexec.runtimes import compose

CONTRACT = compose.composed(ExecutionContract("Qwen3ForCausalLM", "cpu"))
ROOT = Path(__file__).resolve().parents[2]


def entry(region, case="trainer_score"):
    return next(e for e in CONTRACT.composition if e.region == region and case in e.cases)


def others(*removed):
    return [e for e in CONTRACT.composition if e not in removed]


def changed(which, /, case="trainer_score", **changes):
    old = entry(which, case)
    return dataclasses.replace(CONTRACT, composition=(*others(old), dataclasses.replace(old, **changes)))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", REGIONS)
def test_every_architecture_composes_and_round_trips(architecture, backend):
    contract = compose.composed(ExecutionContract(architecture, backend), "sm_90" if backend == "cuda" else None)
    text = contract.to_json()
    assert ExecutionContract.from_json(text) == contract and ExecutionContract.from_json(text).to_json() == text
    assert dataclasses.replace(contract, composition=contract.composition[::-1]).digest == contract.digest
    assert compose.missing_gates(contract, ROOT) == []


def test_the_core_is_of_the_form_of_the_contract():
    contracts = [compose.composed(ExecutionContract("Qwen3_5ForCausalLM", "cpu", Numerics(gdn_form=form))) for form in ("cpr_wy", "cpr")]
    for contract, form in zip(contracts, ("cpr_wy", "cpr")):
        named = {op for e in contract.composition if e.region == "gdn_core" for op, _ in e.implementations}
        assert named == {f"gdn.{form}", f"gdn.{form}_prefill", f"gdn.{form}_decode"} and compose.missing_gates(contract, ROOT) == []
    with pytest.raises(ContractError, match="composition.gdn_core: .* calls op gdn.cpr"):
        dataclasses.replace(contracts[0], numerics=Numerics(gdn_form="cpr"))


def test_a_gate_that_does_not_exist_is_found():
    gates = ("tests/ops/test_norm_cpu.py::test_of_nothing", "tests/ops/absent.py")
    assert compose.missing_gates(changed("norm", gates=gates), ROOT) == sorted(gates)


HALF = ("trainer_forward", "trainer_recompute", "trainer_score")


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            lambda: dataclasses.replace(CONTRACT, composition=tuple(others(entry("norm")))),
            "composition.norm: trainer_forward is not covered",
        ),
        (
            lambda: dataclasses.replace(CONTRACT, composition=(*CONTRACT.composition, entry("norm"))),
            "norm: trainer_forward is covered twice",
        ),
        (lambda: changed("norm", cases=("trainer_score", "evaluation")), "composition.norm.cases: unknown case 'evaluation'"),
        (lambda: changed("norm", cases=()), "composition.norm.cases: expected each case once"),
        (lambda: changed("norm", region="normalisation"), "composition.normalisation: Qwen3ForCausalLM has no such region"),
        (
            lambda: changed("sampling", "engine_decode", cases=("engine_decode", "trainer_score")),
            "sampling: takes no part in trainer_score",
        ),
        (lambda: changed("norm", gates=()), "composition.norm.gates: an implementation without gates"),
        (lambda: changed("norm", artifact="0"), "composition.norm.artifact: expected a sha256"),
        (lambda: changed("norm", version=""), "composition.norm.version"),
        (lambda: changed("norm", architecture="sm_90"), "composition.norm.architecture: 'sm_90' is no architecture of backend cpu"),
        (lambda: changed("norm", discharge="hope"), "composition.norm.discharge: expected one of"),
        (lambda: changed("attention", discharge="same", discharged_by=""), "composition.attention: .* nothing says why"),
        (lambda: changed("attention", discharged_by=""), "composition.attention.discharged_by: 'equivalence' expects the test"),
        (
            lambda: changed("norm", implementations=entry("norm").implementations[:1]),
            "composition.norm: trainer_forward calls op norm.rms_norm",
        ),
        (
            lambda: changed("rope", implementations=(*entry("rope").implementations, ("rope.spin", "m:f"))),
            "rope: op 'rope.spin' is not of this region",
        ),
        (
            lambda: changed("attention", constants=(("kv_block", "0x00000020"),)),
            "attention.constants.kv_block: 0x00000020 is not numerics.kv_block 64",
        ),
        (lambda: changed("norm", constants=(("epsilon", "1e-6"),)), "constants.epsilon: expected a bit pattern"),
        (lambda: changed("logprob", constants=()), "composition.logprob.constants.vocab_block: cases disagree"),
        (lambda: dataclasses.replace(CONTRACT, architecture="LlamaForCausalLM"), "no regions are known for LlamaForCausalLM"),
        (lambda: dataclasses.replace(CONTRACT, refused=CONTRACT.refused[1:]), "refused: expected exactly"),
        (lambda: dataclasses.replace(CONTRACT, dtypes=(("*", "float32"),)), r"dtypes.\*: expected bfloat16, found 'float32'"),
        (lambda: dataclasses.replace(CONTRACT, obligations=(("kv_cache", ()),)), "obligations.kv_cache: expected"),
        (lambda: dataclasses.replace(CONTRACT, model="abc"), "model: expected a sha256"),
    ],
)
def test_rules(edit, message):
    with pytest.raises(ContractError, match=message) as error:
        edit()
    assert "\n" not in str(error.value)


def test_an_asymmetry_without_discharge_is_refused_and_one_with_it_is_not():
    old = entry("norm")
    rest = tuple(case for case in old.cases if case not in HALF)
    twin = dict(discharge="twin", discharged_by="tests/ops/test_norm_cpu.py::test_layout_moves_nothing")
    for discharge, refused in ((dict(), True), (twin, False)):
        halves = [dataclasses.replace(old, cases=cases, **discharge) for cases in (HALF, rest)]
        composition = (*others(old), *halves)
        if refused:
            with pytest.raises(ContractError, match="composition.norm"):
                dataclasses.replace(CONTRACT, composition=composition)
        else:
            dataclasses.replace(CONTRACT, composition=composition)


def test_two_device_architectures_are_refused():
    cuda = tuple(dataclasses.replace(e, architecture="sm_90" if e.region == "norm" else "sm_100" if e.region == "linear" else "any")
                 for e in CONTRACT.composition)  # fmt: skip
    with pytest.raises(ContractError, match="entries for sm_100 and sm_90"):
        ExecutionContract("Qwen3ForCausalLM", "cuda", composition=cuda)


def test_what_is_installed_is_what_was_composed():
    compose.check_installed(CONTRACT)
    compose.check_installed(ExecutionContract("Qwen3ForCausalLM", "cpu"))  # pins nothing
    with pytest.raises(
        ContractError, match=r"composition.norm.artifact: the contract has .*0000.*this installation has .*; install the same"
    ):
        compose.check_installed(changed("norm", artifact="0" * 64))


def ran(case="trainer_score"):
    """The calls of a faithful execution of ``case``."""
    targets = {op: target for e in CONTRACT.composition if case in e.cases for op, target in e.implementations}
    return {(op, case, targets[op]): 3 for region in REGIONS["Qwen3ForCausalLM"] for op in region.ops(case)}


def test_served_as_declared():
    check_served(CONTRACT, {})
    for case in ("trainer_score", "engine_prefill", "engine_decode"):
        check_served(CONTRACT, ran(case) | {("norm.rms_norm", None, "elsewhere"): 1})
    layers = {
        key: n
        for key, n in ran("trainer_recompute").items()
        if not key[0].startswith(("embedding", "logprob", "matmul.lm", "rope.rope_table"))
    }
    check_served(CONTRACT, layers)  # recomputation covers the layers alone


@pytest.mark.parametrize("missing", sorted(op for op, _, _ in ran()))
def test_declared_but_not_served(missing):
    calls = {key: n for key, n in ran().items() if key[0] != missing}
    with pytest.raises(ContractError, match=f"op {re.escape(missing)}, case trainer_score: declared .* never called"):
        check_served(CONTRACT, calls)
    check_served(CONTRACT, calls, whole=False)


def test_served_but_not_declared_and_fallbacks():
    with pytest.raises(ContractError, match="op gdn.cpr_wy, case trainer_score: called, and not declared"):
        check_served(CONTRACT, ran() | {("gdn.cpr_wy", "trainer_score", "x:y"): 1})
    with pytest.raises(ContractError, match="op attention.varlen, case engine_decode: called, and not declared"):
        check_served(CONTRACT, ran("engine_decode") | {("attention.varlen", "engine_decode", "x:y"): 1})
    with pytest.raises(
        ContractError, match="op matmul.linear, case trainer_score: the contract names isoexec.ops.matmul.reference:linear, x:y served it"
    ):
        check_served(CONTRACT, ran() | {("matmul.linear", "trainer_score", "x:y"): 1})


def test_an_entry_has_names():
    with pytest.raises(ContractError, match="composition.7.region: expected a string"):
        Entry(7, (), (), "", "", (), "", ())
