"""Shared ground of the tests: one intra-op thread, a seed per test."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20_260_101)


#: Areas whose buffers hold NaN until they are written.
_POISONED = ("ops", "gdn", "moe")


@pytest.fixture(autouse=True)
def _poisoned_memory(request):
    """Buffers that torch would leave uninitialised hold NaN while a test of an op runs: whatever is read before it is written shows."""
    if request.path.relative_to(Path(__file__).parent).parts[0] not in _POISONED:
        yield
        return
    # The debug mode is use_deterministic_algorithms without its import of the compiler.
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(8).isnan().all()
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
