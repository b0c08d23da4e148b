"""Without a contract the patched tree trains as upstream's does, bit for bit.

Upstream's own tree cannot run without CUDA. It is given the patches that only carry it to a CPU (``Ops: none`` in their headers), and none
that knows of isoexec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = ROOT / "patches" / "megatron"
#: Every kind of layer that a patch touches: Gated DeltaNet and shared experts in the third, latent attention and the experts' bias in the last.
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Glm4MoeLiteForCausalLM")

_RUN = """
import hashlib, json, sys
from pathlib import Path
import megatron.core
from isoexec.ops._core.bits import as_bits
from isoexec.runtimes.megatron.trainer import PolicyTrainer

models, sequences, out = json.loads(sys.argv[1])


def score(trainer):
    return [[as_bits(s.logprobs).tolist(), s.row_digests] for s in trainer.logprobs(sequences, temperature=0.8, with_rows=True)]


def run(model, out):
    trainer = PolicyTrainer(model)
    result = {"scores": score(trainer)}
    step = trainer.train_step(sequences, None, 1.0, packing=[[i] for i in range(len(sequences))])
    result |= {"loss": float(step["loss"]).hex(), "grad_norm": float(step["grad_norm"]).hex()}
    trainer.export_hf(out)
    result["weights"] = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.glob("*.safetensors"))]
    trainer.gpt.decoder.final_layernorm.weight.data[0] *= 1 + 2**-7  # one bf16 ulp
    result["nudged"] = score(trainer)
    trainer.close()
    return result


results = {name: run(model, Path(out, name)) for name, model in models.items()}
results["file"] = megatron.core.__file__
Path(out, "result.json").write_text(json.dumps(results))
"""


def _upstream_for_cpu(folder: Path) -> Path:
    """Upstream's files with the patches of no op."""
    import megatron.core

    tree = Path(megatron.core.__file__).parents[2]
    if subprocess.run(["git", "-C", tree, "cat-file", "-e", "upstream"], capture_output=True).returncode:
        pytest.skip(f"{tree} is not a build tree with a commit `upstream`; run `make build`")
    archive = subprocess.run(["git", "-C", tree, "archive", "upstream", "megatron"], check=True, capture_output=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    left_out = []
    for name in (PATCHES / "series").read_text().split():
        patch = PATCHES / name
        if "\nOps: none" in patch.read_text():
            subprocess.run(["git", "apply", patch], cwd=folder, check=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
        else:
            left_out.append(name)
    assert len(left_out) >= 2 and not any(b"isoexec" in file.read_bytes() for file in folder.rglob("*.py"))
    return folder


def _start(models: dict[str, str], sequences: list, out: Path, tree: Path | None) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if k != "ISOEXEC_CONTRACT"} | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in (tree, ROOT) if path)
    out.mkdir()
    return subprocess.Popen([sys.executable, "-c", _RUN, json.dumps([models, sequences, str(out)])], env=environment)


@pytest.fixture(scope="module")
def results(model_folder, checkpoint_of, sequences, tmp_path_factory):
    """What the patched and upstream's tree compute, by architecture. One process each: importing Megatron costs more than a model."""
    folder = tmp_path_factory.mktemp("pristine")
    models = {name: checkpoint_of(name)[0] if name != "Qwen3ForCausalLM" else model_folder for name in ARCHITECTURES}
    tree = _upstream_for_cpu(folder / "tree")
    processes = {name: _start(models, sequences, folder / name, of) for name, of in (("patched", None), ("upstream", tree))}
    try:
        assert all(process.wait(timeout=500) == 0 for process in processes.values())
    finally:
        for process in processes.values():
            process.kill()
    patched, upstream = (json.loads((folder / name / "result.json").read_text()) for name in processes)
    assert upstream["file"].startswith(str(tree)) and not patched["file"].startswith(str(tree))
    return patched, upstream


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_a_contract_it_is_upstream(results, sequences, architecture):
    patched, upstream = (result[architecture] for result in results)
    assert patched == upstream and len(patched["scores"]) == len(sequences) and patched["weights"]
    assert all(a[1] != b[1] for a, b in zip(patched["scores"], patched["nudged"]))  # a last bit would have shown
