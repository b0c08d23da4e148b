"""Buffers that torch would leave uninitialised hold NaN while an op's test runs: whatever is read before it is written shows."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _poisoned_memory():
    # The debug mode is use_deterministic_algorithms without its import of the compiler.
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(8).isnan().all()
    yield
    torch.set_deterministic_debug_mode(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
