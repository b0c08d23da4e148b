"""Shared ground of the tests: one intra-op thread, a seed per test, and no buffer that happens to be zero."""

from pathlib import Path

import pytest
import torch

from isoexec.ops._core import registry
from tests.poison import unwritten_memory

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20_260_101)


#: Areas whose buffers hold NaN until they are written, from the fixtures of a module on.
_POISONED = ("ops", "gdn", "moe", "models", "megatron", "engine")


#: Areas that give ops fp32 operands which hold bf16 values, to compare what comes out before it is rounded.
_BEFORE_ROUNDING = ("ops", "gdn", "moe", "models")


@pytest.fixture(autouse=True)
def _values_before_rounding(request):
    if request.path.relative_to(Path(__file__).parent).parts[0] not in _BEFORE_ROUNDING:
        yield
        return
    with registry.before_rounding():
        yield


@pytest.fixture(scope="module", autouse=True)
def _poisoned_memory(request):
    """Whatever an op, a model or a runtime reads before it is written shows: tests/poison.py."""
    if request.path.relative_to(Path(__file__).parent).parts[0] not in _POISONED:
        yield
        return
    with unwritten_memory(poisoned=True):
        yield
