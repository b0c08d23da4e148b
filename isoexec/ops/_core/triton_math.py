"""Elementary functions and reductions of the Triton backend: one definition each, used by every kernel.

Kernels are compiled with ``enable_fp_fusion=False`` (see `COMPILE`), so that no multiply-add is contracted. Under the interpreter
(``TRITON_INTERPRET=1``, tests without a GPU) products are taken in fp32 of the same operands.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
COMPILE = {} if INTERPRET else {"enable_fp_fusion": False}
_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def dot(a, b):
    """bf16 product, fp32 accumulation in ascending K from +0.0."""
    if _INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def dot_add(a, b, acc):
    """bf16 product accumulated into ``acc``."""
    if _INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def sigmoid(x):
    # div_rn: the default division is approximate and flushes subnormals.
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    y = tl.exp(tl.minimum(x, 20.0))
    if _INTERPRET:
        small = tl.log(1.0 + y)
    else:
        small = libdevice.log1p(y)
    return tl.where(x > 20.0, x, small)


@triton.jit
def rsqrt(x):
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@triton.jit
def row_sum(x, R: tl.constexpr, N: tl.constexpr, LOGN: tl.constexpr):
    """[R, N] -> [R, 1], N = 2**LOGN: halving tree, x[i] + x[i + n/2]. Each level adds two terms, so no layout changes a bit."""
    for level in tl.static_range(LOGN):
        x = tl.sum(tl.reshape(x, (R, 2, N >> (level + 1))), 1)
    return x


@triton.jit
def column(x, mask, axis: tl.constexpr):
    """The one element along ``axis`` that ``mask`` selects, bit for bit (a float sum would turn -0.0 into 0.0)."""
    bits = tl.where(mask, x.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def tree_push(total, one, two, four, g, LEAVES: tl.constexpr):
    """Takes leaf ``g`` = 0, 1, .. of ``LEAVES`` <= 8 into the balanced tree, neighbours first.

    ``total``: the leaf. ``one``, ``two``, ``four``: sums of so many leaves that wait for a partner. Returns the sum of the aligned run of leaves that
    ends with ``g``, and what waits now. ``g`` may be a constant or a loop's counter.
    """
    if g % 2 == 0:
        one = total
    else:
        total = one + total
        if LEAVES > 2:
            if g % 4 == 1:
                two = total
            else:
                total = two + total
                if LEAVES > 4:
                    if g % 8 == 3:
                        four = total
                    else:
                        total = four + total
    return total, one, two, four
