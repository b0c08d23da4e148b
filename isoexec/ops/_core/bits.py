"""Bit patterns: the only notion of equality in this project.

``torch.equal`` calls 0.0 and -0.0 equal and NaN different from itself; both hide faults. Compare integer views.
"""

from __future__ import annotations

import hashlib

import torch

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """Integer view of a contiguous copy of ``x``: same shape, same width."""
    return x.detach().contiguous().view(_INTEGER[x.element_size()])


def bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True when dtype, shape and every bit agree."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((as_bits(a) == as_bits(b)).all())


def assert_bit_equal(a: torch.Tensor, b: torch.Tensor, what: str = "tensors") -> None:
    """Raise AssertionError naming the first differing element, both values and how many elements differ."""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise AssertionError(f"{what}: {a.dtype} {tuple(a.shape)} against {b.dtype} {tuple(b.shape)}")
    different = as_bits(a) != as_bits(b)
    if different.any():
        index = tuple(int(i) for i in different.nonzero()[0])
        where = index if len(index) != 1 else index[0]
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {where}: "
            f"{a[index].item()!r} against {b[index].item()!r}"
        )


def nudge(x: torch.Tensor, index=0, ulps: int = 1) -> torch.Tensor:
    """Copy of ``x`` with the element at flat ``index`` moved by ``ulps`` units in the last place (negative controls)."""
    moved = x.detach().clone().contiguous()
    moved.view(_INTEGER[x.element_size()]).view(-1)[index] += ulps
    return moved


def row_digests(rows: torch.Tensor) -> list[str]:
    """SHA-256 (first 16 hex digits) of the bytes of each row of ``rows`` [N, ...]."""
    raw = rows.detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in raw]
