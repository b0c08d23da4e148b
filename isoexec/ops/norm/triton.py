"""RMS norms in Triton: one kernel for every variant, one for every gradient.

The row sum is the halving tree of docs/schedule.md, and every other step rounds as IEEE 754 says, so all variants but the gated one
(its exp) give the bits of the CPU backend, whatever the number of warps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.contract import ContractError
from isoexec.ops._core.rows import power_of_two, row_offset, rows_of
from isoexec.ops._core.triton_math import COMPILE, row_sum, rsqrt, sigmoid, silu

_GRADIENT_PROGRAMS = 132  # each leaves one fp32 partial of the weight's gradient
_GRADIENT_TILE = 8192  # elements of a step of one program: 64 a thread
_MAX_WIDTH = 16384


@triton.jit
def forward_kernel(x, residual, gate, weight, y, total, r_out, count, eps, x_inner, x_outer, x_step, gate_inner, gate_outer,
                   gate_step, D: tl.constexpr, N: tl.constexpr, LOGN: tl.constexpr, R: tl.constexpr, ADD: tl.constexpr,
                   GATED: tl.constexpr, INNER: tl.constexpr, SHIFT: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.arange(0, N)
    here = (row < count)[:, None] & (c < D)[None, :]
    packed = row.to(tl.int64)[:, None] * D + c[None, :]
    v = tl.load(x + row_offset(row, x_inner, x_outer, x_step)[:, None] + c[None, :], mask=here, other=0.0).to(tl.float32)
    if ADD:
        # The norm reads the rounded sum: the next block adds to the same bits.
        added = (v + tl.load(residual + packed, mask=here, other=0.0).to(tl.float32)).to(y.dtype.element_ty)
        tl.store(total + packed, added, mask=here)
        v = added.to(tl.float32)
    mean = tl.div_rn(row_sum(v * v, R, N, LOGN), tl.full([R, 1], D, tl.float32))
    r = rsqrt(mean + eps)
    n = v * r
    if INNER:
        n = n.to(y.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    if SHIFT:
        w = w + 1.0
    n = n * w
    if GATED:
        z = tl.load(gate + row_offset(row, gate_inner, gate_outer, gate_step)[:, None] + c[None, :], mask=here, other=0.0)
        n = n * silu(z.to(tl.float32))
    tl.store(y + packed, n.to(y.dtype.element_ty), mask=here)
    if SAVE:
        tl.store(r_out + row[:, None], r, mask=(row < count)[:, None])


@triton.jit
def backward_kernel(grad, grad_total, x, gate, weight, r_in, grad_x, grad_gate, grad_weight, count, steps, x_inner, x_outer, x_step,
                    gate_inner, gate_outer, gate_step, D: tl.constexpr, N: tl.constexpr, R: tl.constexpr, ADD: tl.constexpr,
                    GATED: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    """A fixed run of rows per program. The weight's gradient is summed in registers: no atomics, the same bits in every run."""
    pid = tl.program_id(0)
    c = tl.arange(0, N)
    w = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    if SHIFT:
        w = w + 1.0
    acc = tl.zeros([R, N], dtype=tl.float32)
    for step in tl.range(steps, num_stages=3):
        row = (pid * steps + step) * R + tl.arange(0, R)
        here = (row < count)[:, None] & (c < D)[None, :]
        packed = row.to(tl.int64)[:, None] * D + c[None, :]
        g = tl.load(grad + packed, mask=here, other=0.0).to(tl.float32)
        v = tl.load(x + row_offset(row, x_inner, x_outer, x_step)[:, None] + c[None, :], mask=here, other=0.0).to(tl.float32)
        r = tl.load(r_in + row, mask=row < count, other=0.0)[:, None]
        n = v * r
        if GATED:
            at = row_offset(row, gate_inner, gate_outer, gate_step)[:, None] + c[None, :]
            z = tl.load(gate + at, mask=here, other=0.0).to(tl.float32)
            s = sigmoid(z)
            dz = g * n * w * (s * (1.0 + z * (1.0 - s)))
            tl.store(grad_gate + packed, dz.to(grad_gate.dtype.element_ty), mask=here)
            g = g * (z * s)
        acc += g * n
        g = g * w
        dx = r * (g - n * (tl.sum(g * n, 1)[:, None] / D))
        if ADD:
            dx += tl.load(grad_total + packed, mask=here, other=0.0).to(tl.float32)
        tl.store(grad_x + packed, dx.to(grad_x.dtype.element_ty), mask=here)
    tl.store(grad_weight + pid.to(tl.int64) * D + c, tl.sum(acc, 0), mask=c < D)


def launch(width: int) -> tuple[int, int, int]:
    """(columns N, rows per program, warps) for rows of ``width``: a committed choice that moves no bit.

    A row in one warp needs no shared memory for its tree: on an H200, 8192 rows of 2048 take 19 us with one warp, 75 us with four.
    """
    if not 0 < width <= _MAX_WIDTH:
        raise ContractError(f"norm: rows of {width} are not supported on a GPU; expected 1 to {_MAX_WIDTH}")
    N = power_of_two(width)
    if N <= 256:
        return N, 1024 // N, 2
    return N, 1, max(N // 4096, 1)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual, gate, weight, eps, shift, inner):
        D = weight.shape[0]
        _check(x, residual, gate, weight)
        N, R, warps = launch(D)
        xs, zs = rows_of(x), rows_of(x if gate is None else gate)
        save = any(ctx.needs_input_grad)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = torch.empty_like(y) if residual is not None else y
        r = torch.empty(xs.count if save else 0, dtype=torch.float32, device=x.device)
        if xs.count:
            forward_kernel[triton.cdiv(xs.count, R),](
                xs.x, y if residual is None else residual.contiguous(), zs.x, weight.contiguous(), y, total, r, xs.count, eps,
                *xs.address, *zs.address, D, N, N.bit_length() - 1, R, ADD=residual is not None, GATED=gate is not None,
                INNER=inner, SHIFT=shift, SAVE=save, num_warps=warps, **COMPILE,
            )  # fmt: skip
        ctx.save_for_backward(x if residual is None else total, gate, weight, r)
        ctx.shift, ctx.add = shift, residual is not None
        return (y, total) if residual is not None else y

    @staticmethod
    def backward(ctx, grad, grad_total=None):
        x, gate, weight, r = ctx.saved_tensors
        N = launch(weight.shape[0])[0]
        # On an H200, 8192 rows of 2048: 31 us with the sum of the partials, 39 us with one row at a time and 1,024 programs.
        R, warps = max(_GRADIENT_TILE // N, 1), max(N // 2048, 4 if gate is None else 8)
        xs, zs = rows_of(x), rows_of(x if gate is None else gate)
        steps = triton.cdiv(triton.cdiv(xs.count, R), _GRADIENT_PROGRAMS)
        programs = triton.cdiv(xs.count, R * steps) if steps else 0
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_gate = None if gate is None else torch.empty(gate.shape, dtype=gate.dtype, device=x.device)
        partial = torch.empty(programs, weight.shape[0], dtype=torch.float32, device=x.device)
        if programs:
            backward_kernel[programs,](
                grad.contiguous(), grad_total.contiguous() if ctx.add else grad, xs.x, zs.x, weight.contiguous(), r, grad_x,
                grad_x if gate is None else grad_gate, partial, xs.count, steps, *xs.address, *zs.address, weight.shape[0], N, R,
                ADD=ctx.add, GATED=gate is not None, SHIFT=ctx.shift, num_warps=warps, **COMPILE,
            )  # fmt: skip
        grad_weight = partial.sum(0).to(weight.dtype) if ctx.needs_input_grad[3] else None
        return grad_x, grad_x if ctx.add else None, grad_gate, grad_weight, None, None, None


def _check(x, residual, gate, weight) -> None:
    for name, other in (("residual", residual), ("gate", gate)):
        if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
            raise ContractError(f"norm: {name} is {other.dtype} {tuple(other.shape)}, x is {x.dtype} {tuple(x.shape)}; they must agree")
    if x.dtype != torch.bfloat16 or weight.shape != x.shape[-1:]:
        raise ContractError(f"norm: expected x [..., D] bf16 and weight [D], found {x.dtype} {tuple(x.shape)} and {tuple(weight.shape)}")


def rms_norm(x, weight, eps):
    return _Norm.apply(x, None, None, weight, eps, False, True)


def zero_centered_rms_norm(x, weight, eps):
    return _Norm.apply(x, None, None, weight, eps, True, False)


def add_rms_norm(x, residual, weight, eps):
    return _Norm.apply(x, residual, None, weight, eps, False, True)


def add_zero_centered_rms_norm(x, residual, weight, eps):
    return _Norm.apply(x, residual, None, weight, eps, True, False)


def gated_rms_norm(x, gate, weight, eps):
    return _Norm.apply(x, None, gate, weight, eps, False, False)


@triton.jit
def add_kernel(x, residual, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < size
    v = tl.load(x + at, mask=here, other=0.0).to(tl.float32) + tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=here)


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, residual):
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if y.numel():
            add_kernel[triton.cdiv(y.numel(), 4096),](x.contiguous(), residual.contiguous(), y, y.numel(), BLOCK=4096, num_warps=4, **COMPILE)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def residual_add(x, residual):
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ContractError(f"norm.residual_add: x is {x.dtype} {tuple(x.shape)}, residual {residual.dtype} {tuple(residual.shape)}")
    return _ResidualAdd.apply(x, residual)
