"""Gates of the GPU backend (gates.py), skipped without a GPU. Their last record, gpu_results.json, must be of these kernels."""

import importlib.util
import shutil

import pytest
import torch

from isoexec.contract import Numerics
from isoexec.contract.types import ExecutionContract
from isoexec.ops.gdn import launch
from isoexec.runtimes import evidence
from tests.gdn import gates

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", gates.jobs())
def test_gate(name):
    gate, *arguments = gates.jobs()[name]
    if gate.__name__ == "accuracy" and importlib.util.find_spec("fla") is None:
        pytest.skip("needs fla-core: the bound is the error of its kernel")
    gate(*arguments)


@pytest.mark.parametrize("kernel", launch.TABLE)
def test_every_launch_setting_is_in_the_identity(kernel, monkeypatch):
    architecture = "Qwen3_5ForCausalLM"
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


@pytest.mark.parametrize("source", launch.sources(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_source_is_in_the_digest_and_in_the_identity(source, copied):
    """An edit of its code changes the digest, one of its comments does not; and a contract's op digests read the file."""
    path = copied / source.parent.name / source.name
    text = path.read_text()
    assert launch.digest(copied / "gdn") == launch.digest()
    path.write_text(text + "\nADDED = 1\n")
    assert launch.digest(copied / "gdn") != launch.digest()
    path.write_text(text.replace('"""', '"""Another docstring. ', 1) + "\n# a comment\n")
    assert launch.digest(copied / "gdn") == launch.digest()
    path.write_text(text)
    read = set()
    for form in ("cpr", "cpr_wy"):
        contract = ExecutionContract("Qwen3_5ForCausalLM", "cuda", numerics=Numerics(gdn_form=form))
        for op in evidence.op_digests(contract).values():
            read |= set(evidence.sources(op["implementation"].partition(":")[0]))
    assert source in read


def test_constants_of_launches_are_in_the_table():
    """A launch takes its sizes and warps from the table: none is written where a kernel is launched."""
    for path in launch.sources():
        if path.parent.name == "gdn" and path.name != "launch.py":
            assert "num_warps=" not in path.read_text(), path
