"""Gates of the core's backward: gradients need the same bits from run to run, and fp64's value."""

from __future__ import annotations

import contextlib

import torch

from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.gdn import launch
from tests.gdn.cases import relative
from tests.gdn.gate_tools import entries, make
from tests.gdn.gradient_cases import NAMES, gradients, recurrence_gradients

#: Kernel -> other settings of it.
TILES = {
    "back_chain": [dict(BV=16, num_warps=1, stages=2), dict(BV=32, num_warps=2, stages=1), dict(BV=128, num_warps=8, stages=2)],
    "back_chain_narrow": [dict(BV=16, num_warps=1, stages=2), dict(BV=64, num_warps=4, stages=1)],
    "back_inner": [dict(BV=32, num_warps=4, stages=2), dict(BV=64, num_warps=8, stages=1)],
    "back_query": [dict(BK=32, BV=64, num_warps=4, stages=2), dict(BK=128, BV=64, num_warps=8, stages=2)],
    "back_key": [dict(BV=32, num_warps=4, stages=2), dict(BV=64, num_warps=8, stages=1)],
    "back_gate": [dict(num_warps=2), dict(num_warps=4)],
}


def _case(lengths):
    x = make(lengths, H=2, HV=4)
    weight = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    return x, weight, recurrence_gradients(x, lengths, weight)


def _twice(form, x, lengths, chunk, weight, what):
    first, second = (gradients(form, x, lengths, chunk, weight) for _ in range(2))
    for name, a, b in zip(NAMES, first, second):
        assert_bit_equal(a, b, f"{what}: gradient of {name}, second run")
    return first


def backward(form, chunk):
    """Two runs equal; error against fp64; few sequences and many (other tiles of the chain); controls."""
    errors = {}
    for lengths in ([70, 0, 1, 64, 200], [70, 0, 1, 64, 200] + [33] * 46):
        x, weight, exact = _case(lengths)
        found = _twice(form, x, lengths, chunk, weight, f"{len(lengths)} sequences")
        for name, a, e in zip(NAMES, found, exact):
            errors[name] = max(errors.get(name, 0.0), relative(a, e))
    assert max(errors.values()) < 1e-2, errors
    for at, (name, t) in enumerate(zip(NAMES, x)):
        where = t.numel() // 2 if t.dtype == torch.bfloat16 else slice(None)  # a decay may hide one ulp of one gate
        moved = [*x[:at], nudge(t, where), *x[at + 1 :]]
        other = gradients(form, moved, lengths, chunk, weight)
        assert not all(bit_equal(a, b) for a, b in zip(found, other)), f"one ulp of {name} was not seen"
    other = gradients(form, x, lengths, chunk, nudge(weight, weight.numel() // 2))
    assert not all(bit_equal(a, b) for a, b in zip(found, other)), "one ulp of the output's gradient was not seen"
    assert relative(found[0], 1.02 * exact[0]) > 1e-2, "a gradient that is 2 percent off would pass"
    return {"relative_error": errors}


def backward_tiles(chunk):
    """Other tiles: two runs equal, and no further from fp64."""
    lengths = [70, 0, 1, 64, 200]
    x, weight, exact = _case(lengths)
    worst = {}
    for kernel, settings in TILES.items():
        for setting in settings:
            with contextlib.ExitStack() as stack:
                if kernel == "back_chain":  # few sequences would take the narrow one
                    stack.enter_context(entries("limits", None, **{**launch.settings("limits"), "narrow": 0}))
                stack.enter_context(entries(kernel, chunk, **setting))
                found = _twice("cpr_wy", x, lengths, chunk, weight, f"{kernel} {setting}")
            error = max(relative(a, e) for a, e in zip(found, exact))
            assert error < 1e-2, (kernel, setting, error)
            worst[kernel] = max(worst.get(kernel, 0.0), error)
    return {"worst_relative_error": worst}
