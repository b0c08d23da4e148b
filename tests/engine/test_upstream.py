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

#: The dense one, and those that have experts, and Gated DeltaNet beside them.
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
#: Without it no step of a model with experts runs on a CPU that lacks AVX-512; the pristine tree is given it. It knows nothing of isoexec.
PORTABILITY = "activate-experts-on-the-cpu-without-building-an-op.patch"

_RUN = """
import json, sys
from isoexec.runtimes.vllm.engine import RolloutEngine
import vllm
models, prompts, seeds = json.loads(sys.argv[1])
found = {"file": vllm.__file__}
for name, model in models.items():
    engine = RolloutEngine(model)
    found[name] = [r.__dict__ for r in engine.generate(prompts, seeds, 0.8, 8, record_rows=True)]
    engine.close()
json.dump(found, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def pristine_tree(tmp_path_factory):
    """The Python files of the tree's commit `upstream`, with :data:`PORTABILITY` and the build's compiled extensions."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; run `make build`")
    import vllm

    tree = Path(vllm.__file__).parents[1]
    if subprocess.run(["git", "-C", tree, "cat-file", "-e", "upstream"], capture_output=True).returncode:
        pytest.skip(f"{tree} is not a build tree with a commit `upstream`; run `make build`")
    folder = tmp_path_factory.mktemp("pristine")
    archive = subprocess.run(["git", "-C", tree, "archive", "upstream", "vllm"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    patch = Path(__file__).parents[2] / "patches" / "vllm" / PORTABILITY
    assert "\nOps: none: portability\n" in patch.read_text() and "isoexec" not in patch.read_text().split("---\n", 1)[1]
    subprocess.run(["git", "apply", patch], cwd=folder, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
    for binary in tree.glob("vllm/**/*.so"):
        target = folder / binary.relative_to(tree)
        if not target.exists():
            target.symlink_to(binary)
    return folder


@pytest.fixture(scope="module")
def run(prompts):
    """(prompts, seeds) of each model."""
    return prompts[4:12], list(range(8))


@pytest.fixture(scope="module")
def pristine(pristine_tree, made, run, tmp_path_factory):
    """``pristine()`` -> what the pristine tree generates, by architecture. One process for all: importing vLLM costs more than they do."""
    result = tmp_path_factory.mktemp("result") / "pristine.json"
    environment = {k: v for k, v in os.environ.items() if k != "ISOEXEC_CONTRACT"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{pristine_tree}{os.pathsep}{Path(__file__).parents[2]}"}
    models = {name: str(made(name)[0]) for name in ARCHITECTURES}
    process = subprocess.Popen([sys.executable, "-c", _RUN, json.dumps([models, *run]), str(result)], env=environment)

    def wait() -> dict:
        assert process.wait(timeout=400) == 0
        found = json.loads(result.read_text())
        assert Path(found["file"]).is_relative_to(pristine_tree)
        return found

    yield wait
    process.kill()
    process.wait()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_unset_contract_is_the_pristine_tree(open_engine, pristine, made, run, architecture):
    checkpoint, contract = made(architecture)
    before = registry.served()
    with open_engine(checkpoint, contract=None) as engine:
        patched = engine.generate(*run, 0.8, 8, record_rows=True)
    assert registry.served() == before
    expected = pristine()[architecture]
    assert [bits(r) for r in patched] == [(r["tokens"], bits(type(patched[0])(**r))[1], r["row_digests"]) for r in expected]

    with open_engine(checkpoint, contract=contract) as engine:  # the comparison can fail: under the contract rows differ
        assert not any(same(engine.generate(*run, 0.8, 8, record_rows=True), patched))
    served = {key[0] for key, calls in registry.served().items() if calls > before.get(key, 0)}
    assert {"matmul.lm_head", "moe.expert_mlp" if "Moe" in architecture else "activation.silu_mul"} <= served


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
