"""Gates of the GPU backend (gates.py), skipped without a GPU. Their last recorded result is gpu_results.json."""

import json
from pathlib import Path

import pytest
import torch

from isoexec.ops.gdn import launch
from tests.gdn import gates

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("gate", gates.GATES, ids=lambda g: g.__name__)
def test_gate(gate):
    gate(16)


def test_recorded_result_names_its_source_and_what_is_open():
    recorded = json.loads((Path(__file__).parent / "gpu_results.json").read_text())
    assert {"commit", "device", "kernels", "torch"} <= recorded.keys()
    assert {f"{g.__name__}[C=16]" for g in gates.GATES} <= recorded["gates"].keys()
    assert [name for name, result in recorded["gates"].items() if not result["passed"]] == recorded["open"]


def test_recorded_result_is_of_these_kernels():
    recorded = json.loads((Path(__file__).parent / "gpu_results.json").read_text())
    if recorded["kernels"] != launch.digest():
        pytest.skip(f"kernels or launch table changed since {recorded['commit']}: run the gates on a GPU again")
