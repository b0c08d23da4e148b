"""Memory that nobody has written yet holds NaN (integers: the largest), so that whatever is read before it is written shows."""

from __future__ import annotations

import contextlib

import torch


@contextlib.contextmanager
def unwritten_memory(poisoned: bool):
    """Inside, buffers that torch leaves uninitialised are filled, or are not."""
    # The debug mode is use_deterministic_algorithms without its import of the compiler.
    before = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error" if poisoned else "default")
    torch.utils.deterministic.fill_uninitialized_memory = poisoned
    try:
        assert not poisoned or torch.empty(8).isnan().all()
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def adding_unwritten(function):
    """``function(x, ...)`` of x plus zero times memory that nobody has written: the fault that poisoned memory has to show."""
    return lambda x, *arguments, **options: function(x + 0 * torch.empty_like(x), *arguments, **options)
