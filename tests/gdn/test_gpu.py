"""Gates of the GPU backend (gates.py), skipped without a GPU. Their last record, gpu_results.json, must be of these kernels."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from isoexec.contract import ContractError, Numerics
from isoexec.contract.types import ExecutionContract
from isoexec.ops.gdn import launch
from isoexec.runtimes import compose, evidence
from tests.gdn import gates, sanitize

RECORDED = json.loads((Path(__file__).parent / "gpu_results.json").read_text())
AGAIN = "run `python -m tests.gdn.gates` and `python -m tests.gdn.sanitize` on a GPU (docs/gdn.md, Gates) and commit their record"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", gates.jobs())
def test_gate(name):
    gate, *arguments = gates.jobs()[name]
    if gate.__name__ == "accuracy" and importlib.util.find_spec("fla") is None:
        pytest.skip("needs fla-core: the bound is the error of its kernel")
    gate(*arguments)


def test_every_gate_has_passed():
    assert {"commit", "date", "device", "versions"} <= RECORDED.keys()
    assert set(gates.jobs()) == set(RECORDED["gates"]), f"the record is of other gates: {AGAIN}"
    assert RECORDED["verdict"] == "passed" and RECORDED["open"] == [], RECORDED["open"]
    assert all(result["passed"] for result in RECORDED["gates"].values())


def test_the_record_is_of_these_kernels():
    assert RECORDED["kernels"] == launch.digest(), f"kernels or launch table changed since commit {RECORDED['commit']}: {AGAIN}"


def test_a_run_continues_a_record_of_its_own_commit_and_kernels_alone(tmp_path):
    record, path = json.loads(json.dumps(RECORDED)), tmp_path / "results.json"
    of = commit, kernels, device = record["commit"], record["kernels"], record["device"]
    assert gates.passed_before(path, *of) == {}
    cut = next(iter(record["gates"]))
    record["gates"][cut] = {"passed": False, "error": "cut"}
    path.write_text(json.dumps(record))
    assert set(gates.passed_before(path, *of)) == set(gates.jobs()) - {cut}
    for other in (("another", kernels, device), (commit, "another", device), (commit, kernels, "another")):
        assert gates.passed_before(path, *other) == {}


def test_no_kernel_was_seen_to_err():
    """compute-sanitizer, over every kernel: no error but what docs/gdn.md explains."""
    found = RECORDED["sanitizer"]
    assert found["kernels"] == launch.digest(), f"kernels or launch table changed since commit {found['commit']}: {AGAIN}"
    assert set(found["tools"]) == set(sanitize.TOOLS)
    for tool, result in found["tools"].items():
        assert bool(result["errors"]) == bool(result["accesses"]) and result["version"], (tool, result)
        assert sanitize.explained(result["accesses"]), result["accesses"]
        assert set(result["cases"]) == {*sanitize.CASES, sanitize.EDGES}, f"{tool} did not see every case: {AGAIN}"
        assert set(result["launched"]) == sanitize.every_kernel(), f"{tool} did not see every kernel: {AGAIN}"


def test_a_race_elsewhere_is_not_explained():
    recorded = RECORDED["sanitizer"]["tools"]["racecheck"]["accesses"]
    assert recorded and sanitize.explained(recorded)
    kernel, file, line = recorded[0]
    assert not sanitize.explained([*recorded, [kernel, file, str(int(line) + 1)]])
    assert not sanitize.explained([*recorded, ["chain_kernel", file, line]])


@pytest.mark.parametrize("form", ["cpr", "cpr_wy"])
def test_accuracy_is_bounded_by_the_native_kernels(form):
    for name, result in RECORDED["gates"].items():
        if name.startswith(f"accuracy[{form} "):
            assert 0 < result["relative_error"] <= result["native_chunk"], (name, result)
            assert 0 < result["identical_keys"] <= result["identical_keys_native_chunk"], (name, result)


def test_chunks_without_gates_are_refused_on_a_gpu():
    assert compose.GPU_CHUNKS == {form: tuple(sorted(c for f, c in gates.CASES if f == form)) for form in ("cpr", "cpr_wy")}
    for form, chunk in (("cpr_wy", 64), ("cpr", 32)):
        contract = ExecutionContract("Qwen3_5ForCausalLM", "cuda", Numerics(gdn_form=form, gdn_chunk=chunk))
        with pytest.raises(ContractError, match=f"gdn_chunk: {chunk} has not passed the gates of the form {form}"):
            compose.composed(contract, "sm_90")
        compose.composed(dataclasses.replace(contract, numerics=Numerics(gdn_form=form, gdn_chunk=16)), "sm_90")


@pytest.mark.parametrize("kernel", launch.TABLE)
def test_every_launch_setting_is_in_the_identity(kernel, monkeypatch):
    architecture = "Qwen3_5ForCausalLM"
    monkeypatch.setattr(launch, "sources", lambda folder: [])  # the table's part of the digest
    before = launch.digest(), evidence.launch_tables(architecture)
    for case, entry in launch.TABLE[kernel].items():
        for name, value in entry.items():
            with monkeypatch.context() as patch:
                patch.setitem(launch.TABLE[kernel], case, {**entry, name: value + 1})
                assert launch.digest() != before[0] and evidence.launch_tables(architecture) != before[1], (kernel, case, name)
    assert (launch.digest(), evidence.launch_tables(architecture)) == before


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    root = tmp_path_factory.mktemp("ops")
    for path in launch.sources():
        (root / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, root / path.parent.name)
    return root


@pytest.fixture(scope="module")
def read():
    """Files that the op digests of a contract for a GPU are of."""
    found = set()
    for form in ("cpr", "cpr_wy"):
        contract = ExecutionContract("Qwen3_5ForCausalLM", "cuda", numerics=Numerics(gdn_form=form))
        for op in evidence.op_digests(contract).values():
            found |= set(evidence.sources(op["implementation"].partition(":")[0]))
    return found


@pytest.mark.parametrize("source", launch.sources(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_source_is_in_the_digest_and_in_the_identity(source, copied, read):
    """An edit of its code changes the digest, one of its comments does not; and a contract's op digests read the file."""
    path = copied / source.parent.name / source.name
    text = path.read_text()
    before = launch.digest(copied / "gdn")
    path.write_text(text + "\nADDED = 1\n")
    assert launch.digest(copied / "gdn") != before
    path.write_text(text.replace('"""', '"""Another docstring. ', 1) + "\n# a comment\n")
    assert launch.digest(copied / "gdn") == before
    path.write_text(text)
    assert source in read


def test_the_digest_is_of_the_files_alone(copied):
    assert launch.digest(copied / "gdn") == launch.digest()


def test_constants_of_launches_are_in_the_table():
    """A launch takes its sizes and warps from the table: none is written where a kernel is launched."""
    for path in launch.sources():
        if path.parent.name == "gdn" and path.name != "launch.py":
            assert "num_warps=" not in path.read_text(), path
