"""A live run in which one weight of the engine moves by one ulp behind every check: it stops, and says which weight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from isoexec.runtimes.skyrl.steps import read_steps
from tests.skyrl.long import takes_minutes
from tests.skyrl.planted import planted

pytestmark = takes_minutes("a run of two steps and its trace: minutes on two idle cores", 3600)

HERE = Path(__file__).parent
WEIGHT = "model.layers.1.input_layernorm.weight"
#: ``isoexec train`` on a configuration made here.
RUN = """
import sys
from pathlib import Path
from isoexec.train.launch import _quieten, _run
_quieten()
from small_run import small_config
raise SystemExit(_run(small_config(Path(sys.argv[1]), Path(sys.argv[2]))))
"""
#: Weights are compared before step 1, and after its sync: the fault comes right behind.
PLANT = """
_manifest, _calls = manifest, []

def manifest(model):
    found = _manifest(model)
    _calls.append(model)
    if len(_calls) == 2:
        weight = model.model.layers[1].input_layernorm.weight.data
        weight.view(torch.int16)[int(weight.abs().argmax())] += 1
    return found
"""


@pytest.fixture(scope="module")
def stopped(model, tmp_path_factory):
    """(what the run said, its folder)."""
    out, plant = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("plant")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= planted(plant, {"isoexec.runtimes.vllm.weights": PLANT})
    environment.pop("ISOEXEC_CONTRACT", None)
    command = [sys.executable, "-c", RUN, str(model), str(out)]
    return subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=3000), out


def test_the_run_stops_at_the_first_token_that_differs(stopped):
    run, out = stopped
    assert run.returncode == 1, run.stderr[-6000:]
    assert "step 2: " in run.stderr and "tokens differ between rollout and trainer; the first: sequence " in run.stderr, run.stderr[-6000:]
    assert "Traceback" not in run.stderr and " INFO " not in run.stderr, run.stderr[-6000:]  # that is in the log
    assert "tokens differ between rollout and trainer" in (out / "logs/driver.log").read_text()
    [line] = read_steps(out / "steps.jsonl")
    assert (line["step"], line["bit_equal"]) == (1, 1.0)  # nothing is trained on what differs
    assert [folder.name for folder in out.glob("mismatch-*")] == ["mismatch-2"]


def test_the_trace_names_the_weight(stopped):
    run, out = stopped
    assert "DIVERGENT: different weights" in run.stdout, run.stdout[-4000:] + run.stderr[-4000:]
    assert "layer 1, norm.rms_norm" in run.stdout and f"tensors of the checkpoint that differ: {WEIGHT}" in run.stdout
    assert "the engine sampled other tokens" not in run.stdout  # the same weights, seed and prompt
    assert "<html" in (out / "mismatch-2/trace.html").read_text()


def test_the_bundle_is_read_without_a_framework(stopped, tmp_path):
    _, out = stopped
    bundle = out / "mismatch-2/trace.zip"
    source = Path(__file__).parents[2]
    code = "import sys; sys.modules['torch'] = None; from isoexec.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "trace", "compare", str(bundle), "--json"]
    found = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert report["verdict"] == "divergent" and report["first"]["layer"] == 1
