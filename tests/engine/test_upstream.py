"""With no contract the patched tree is the pristine one: the same tokens, logprobs and rows, and no op of ours runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bitwise import bits, same

from isoexec.ops._core import registry

_RUN = """
import json, sys
from isoexec.runtimes.vllm.engine import RolloutEngine
import vllm
model, prompts, seeds = json.loads(sys.argv[1])
engine = RolloutEngine(model)
rollouts = engine.generate(prompts, seeds, 0.8, 8, record_rows=True)
json.dump({"file": vllm.__file__, "rollouts": [r.__dict__ for r in rollouts]}, open(sys.argv[2], "w"))
engine.close()
"""


@pytest.fixture(scope="module")
def pristine_tree(tmp_path_factory):
    """The Python files of the tree's commit `upstream`, with the build's compiled extensions."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; run `make build`")
    import vllm

    tree = Path(vllm.__file__).parents[1]
    if subprocess.run(["git", "-C", tree, "cat-file", "-e", "upstream"], capture_output=True).returncode:
        pytest.skip(f"{tree} is not a build tree with a commit `upstream`; run `make build`")
    folder = tmp_path_factory.mktemp("pristine")
    archive = subprocess.run(["git", "-C", tree, "archive", "upstream", "vllm"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    for binary in tree.glob("vllm/**/*.so"):
        target = folder / binary.relative_to(tree)
        if not target.exists():
            target.symlink_to(binary)
    return folder


def test_unset_contract_is_the_pristine_tree(open_engine, checkpoint, prompts, pristine_tree, tmp_path):
    some, seeds = prompts[4:12], list(range(8))
    result = tmp_path / "pristine.json"
    environment = {k: v for k, v in os.environ.items() if k != "ISOEXEC_CONTRACT"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{pristine_tree}{os.pathsep}{Path(__file__).parents[2]}"}
    process = subprocess.Popen([sys.executable, "-c", _RUN, json.dumps([str(checkpoint), some, seeds]), str(result)], env=environment)
    try:
        before = registry.served()
        with open_engine(checkpoint, contract=None) as engine:
            patched = engine.generate(some, seeds, 0.8, 8, record_rows=True)
        assert registry.served() == before
        assert process.wait(timeout=400) == 0
    finally:
        process.kill()
    pristine = json.loads(result.read_text())
    assert Path(pristine["file"]).is_relative_to(pristine_tree)
    assert [bits(r) for r in patched] == [(r["tokens"], bits(type(patched[0])(**r))[1], r["row_digests"]) for r in pristine["rollouts"]]

    with open_engine(checkpoint) as engine:  # the comparison can fail: under the contract rows differ
        assert not any(same(engine.generate(some, seeds, 0.8, 8, record_rows=True), patched))
    assert registry.served() != before


def test_weights_reload_and_chunks_work_without_a_contract(open_engine, checkpoint, other_checkpoint, prompts):
    """The native arm of the verification: a seeded request survives chunked prefill, and a sync reaches upstream's packed linears."""
    some, seeds = prompts[8:12], list(range(4))
    with open_engine(checkpoint, contract=None, max_num_batched_tokens=33, max_num_seqs=8) as engine:
        first = engine.generate(some, seeds, 1.0, 4, record_rows=True)
        engine.load_weights(other_checkpoint)
        second = engine.generate(some, seeds, 1.0, 4, record_rows=True)
        assert not any(same(first, second))
        engine.load_weights(checkpoint)
        assert all(same(first, engine.generate(some, seeds, 1.0, 4, record_rows=True)))
