"""Rows of a strided tensor, for kernels that work on one row at a time, and the integers they need."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Rows(NamedTuple):
    """Row r of the tensor starts ``(r // inner) * outer + (r % inner) * step`` elements after its first one."""

    x: torch.Tensor
    count: int
    inner: int
    outer: int
    step: int

    @property
    def address(self) -> tuple[int, int, int]:
        return self.inner, self.outer, self.step


def rows_of(x: torch.Tensor) -> Rows:
    """``x`` [..., D] as rows of D elements; a view is read where it lies, unless its strides need more than two steps (then a copy is)."""
    if x.dim() == 1:
        x = x.unsqueeze(0)
    if x.is_contiguous():
        return Rows(x, x.numel() // max(x.shape[-1], 1), 1, x.shape[-1], 0)
    if x.stride(-1) == 1 and x.dim() == 2:
        return Rows(x, x.shape[0], 1, x.stride(0), 0)
    if x.stride(-1) == 1 and x.dim() == 3:
        return Rows(x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1))
    return rows_of(x.contiguous())


def power_of_two(n: int) -> int:
    """Smallest power of two >= n >= 1."""
    return 1 << (n - 1).bit_length()


@triton.jit
def row_offset(row, inner, outer, step):
    """int64: a tensor may hold 2^31 elements and more."""
    major = row // inner
    return major.to(tl.int64) * outer + (row - major * inner).to(tl.int64) * step
