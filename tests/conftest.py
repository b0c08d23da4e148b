"""Shared ground of the tests: one intra-op thread, a seed per test."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20_260_101)
