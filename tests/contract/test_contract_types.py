"""The contract's types, canonical form and the one switch."""

import dataclasses
import json
import os

import pytest

from isoexec.contract import (
    CONTRACT_VARIABLE,
    Claims,
    ContractError,
    ExecutionContract,
    Numerics,
    active_contract,
    canonical_json,
    sha256_hex,
)
from isoexec.contract.identity import advice

CONTRACT = ExecutionContract("Qwen3ForCausalLM", "cpu", claims=Claims(trainer_tp=4, engine_tp=2, trainer_sp=True))


def edited(**changes):
    return json.dumps({**json.loads(CONTRACT.to_json()), **changes})


def test_round_trip():
    again = ExecutionContract.from_json(CONTRACT.to_json())
    assert again == CONTRACT and again.digest == CONTRACT.digest and len(CONTRACT.digest) == 64
    shuffled = json.dumps(dict(reversed(json.loads(CONTRACT.to_json()).items())), indent=2)
    assert ExecutionContract.from_json(shuffled).digest == CONTRACT.digest


def test_every_entry_reaches_the_digest():
    digests = {CONTRACT.digest}
    for name, value in (("architecture", "Qwen3MoeForCausalLM"), ("backend", "cuda")):
        digests.add(dataclasses.replace(CONTRACT, **{name: value}).digest)
    for field in dataclasses.fields(Numerics):
        value = "cpr" if field.name == "gdn_form" else getattr(CONTRACT.numerics, field.name) * 2
        digests.add(dataclasses.replace(CONTRACT, numerics=dataclasses.replace(CONTRACT.numerics, **{field.name: value})).digest)
    for field in dataclasses.fields(Claims):
        old = getattr(CONTRACT.claims, field.name)
        value = (not old) if isinstance(old, bool) else old * 2
        digests.add(dataclasses.replace(CONTRACT, claims=dataclasses.replace(CONTRACT.claims, **{field.name: value})).digest)
    assert len(digests) == 3 + len(dataclasses.fields(Numerics)) + len(dataclasses.fields(Claims))


@pytest.mark.parametrize(
    "text,message",
    [
        ("{", "not JSON"),
        ("[]", "expected an object, found list"),
        ("[" * 100_000, "not JSON"),
        (edited(spare=1), r"unknown entry 'spare'"),
        ('{"backend": "cpu"}', "missing entry 'architecture'"),
        (edited(backend="tpu"), "backend: expected one of .*found 'tpu'"),
        (edited(architecture=""), "architecture"),
        (edited(schedule_version=2), "schedule_version: this build implements 1"),
        (edited(schema_version=0), "schema_version: this build implements 2"),
        (edited(numerics={"row_leaves": 6}), "numerics.row_leaves: expected a power of two, found 6"),
        (edited(numerics={"row_leaves": True}), "numerics.row_leaves"),
        (edited(numerics={"kv_block": 64.0}), "number 64.0: a decimal float has no canonical form"),
        (edited(numerics={"leaves": 8}), "numerics: unknown entry 'leaves'"),
        (edited(numerics={"gdn_form": "chunk"}), "numerics.gdn_form"),
        (edited(claims={"trainer_tp": 0}), "claims.trainer_tp: expected a positive integer"),
        (edited(claims={"trainer_sp": 1}), "claims.trainer_sp: expected true or false"),
        (edited(claims={"engine_tp": 16}), "claims.engine_tp: 16 does not divide numerics.row_leaves 8"),
        (edited(claims={"trainer_ep": 3}), "claims.trainer_ep: 3 does not divide numerics.combine_groups 8"),
    ],
)
def test_what_is_wrong_is_refused_by_name(text, message):
    with pytest.raises(ContractError, match=message):
        ExecutionContract.from_json(text)


def test_canonical_form():
    assert canonical_json({"b": [1, None], "a": "\u00e9", "c": True}) == '{"a":"\\u00e9","b":[1,null],"c":true}'
    assert sha256_hex({"a": 1, "b": 2}) == sha256_hex({"b": 2, "a": 1}) != sha256_hex({"a": 1, "b": 3})
    with pytest.raises(ContractError, match=r"\$\.a\[1\]: float 0.5 has no canonical form; write it as the bit pattern"):
        canonical_json({"a": [1, 0.5]})
    with pytest.raises(ContractError, match="key 1 is not a string"):
        canonical_json({1: 2})


def test_a_contract_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONTRACT.backend = "cuda"


def test_the_switch(tmp_path, monkeypatch):
    monkeypatch.delenv(CONTRACT_VARIABLE, raising=False)
    assert active_contract() is None
    monkeypatch.setenv(CONTRACT_VARIABLE, "")
    assert active_contract() is None
    path = tmp_path / "contract.json"
    path.write_text(CONTRACT.to_json())
    monkeypatch.setenv(CONTRACT_VARIABLE, str(path))
    assert active_contract() == CONTRACT and active_contract() is active_contract()
    monkeypatch.setenv(CONTRACT_VARIABLE, str(tmp_path / "absent.json"))
    with pytest.raises(ContractError, match="absent.json: cannot read the contract"):
        active_contract()
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    monkeypatch.setenv(CONTRACT_VARIABLE, str(tmp_path / "pipe"))
    with pytest.raises(ContractError, match="pipe: expected a file that each process can read"):
        active_contract()
    (tmp_path / "other.json").write_text("{}")
    monkeypatch.setenv(CONTRACT_VARIABLE, str(tmp_path / "other.json"))
    with pytest.raises(ContractError, match=f"^{CONTRACT_VARIABLE}=.*other.json: .*missing entry"):
        active_contract()


@pytest.mark.parametrize("chunk", [8, 24, 128, True, "16"])
def test_chunks_that_no_op_has(chunk):
    with pytest.raises(ContractError, match=r"numerics.gdn_chunk: expected one of \(16, 32, 64\)"):
        Numerics(gdn_chunk=chunk)


def test_the_chunks_of_a_contract_are_those_of_the_ops():
    from isoexec.contract.types import GDN_CHUNKS
    from isoexec.ops.gdn.state import CHUNK_SIZES

    assert GDN_CHUNKS == CHUNK_SIZES


@pytest.mark.parametrize(
    "entry, said",
    [("packages.isoexec.models", "git status"), ("packages.vllm", "requirements/stack.txt"), ("launch.gdn", "a committed table")],
)
def test_what_to_do_fits_what_differs(entry, said):
    assert said in advice(f"numerical_policy.{entry}")


def test_a_contract_of_other_refusals_is_to_be_built_again():
    refused = [*CONTRACT.refused, "compiled_or_captured_graphs"]
    with pytest.raises(ContractError, match="refused: expected exactly .*'compiled_or_captured_graphs'.*; rebuild the contract"):
        ExecutionContract.from_json(edited(refused=refused))
