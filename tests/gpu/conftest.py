"""Kernels run on a GPU where there is one, else under Triton's interpreter (in a process of its own: test_interpreted.py)."""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRET:
    # The interpreter truncates fp32 -> bf16; this makes it round to nearest even, as the hardware does.
    spec = importlib.util.spec_from_file_location("interpreter", Path(__file__).parents[1] / "gdn" / "interpreter.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.fixture(scope="session")
def device():
    if INTERPRET:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU (test_interpreted.py runs this under Triton's interpreter)")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def hardware(device):
    if INTERPRET:
        pytest.skip("says something about a GPU only")
    return device


@pytest.fixture
def random(device):
    """random(*shape, dtype=bf16, scale=1): values drawn on the CPU, so that both devices see the same."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape, dtype=torch.bfloat16, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    return draw
