"""Shared ground of the tests: one intra-op thread, a seed per test."""

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20_260_101)


#: Areas whose tests share engines or models: one process each. Elsewhere a file is what stays together.
_SHARING = ("engine", "megatron")


def pytest_collection_modifyitems(items):
    """Where the suite runs in several processes (``-n``), what shares costly fixtures stays in one."""
    tests = Path(__file__).parent
    for item in items:
        area, *rest = item.path.relative_to(tests).parts
        item.add_marker(pytest.mark.xdist_group(area if area in _SHARING or not rest else f"{area}/{item.path.stem}"))
