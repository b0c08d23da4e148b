"""Gated activations in Triton: tiles of R rows and BLOCK columns. Gradients recompute the sigmoid, so that only the inputs are kept."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.contract import ContractError
from isoexec.ops._core.rows import power_of_two, row_offset, rows_of
from isoexec.ops._core.triton_math import COMPILE, sigmoid, silu

_TILE = 2048  # elements per program


@triton.jit
def _tile(count, F: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """This program's rows [R], columns [1, BLOCK] and which of them exist."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, c, (row < count)[:, None] & (c < F)


@triton.jit
def silu_mul_kernel(gate_up, y, count, inner, outer, step, F: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    row, c, here = _tile(count, F, R, BLOCK)
    source = gate_up + row_offset(row, inner, outer, step)[:, None] + c
    gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=here, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64)[:, None] * F + c, (silu(gate) * up).to(y.dtype.element_ty), mask=here)


@triton.jit
def silu_mul_grad_kernel(grad, gate_up, out, count, inner, outer, step, F: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    row, c, here = _tile(count, F, R, BLOCK)
    source = gate_up + row_offset(row, inner, outer, step)[:, None] + c
    gate = tl.load(source, mask=here, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=here, other=0.0).to(tl.float32)
    g = tl.load(grad + row.to(tl.int64)[:, None] * F + c, mask=here, other=0.0).to(tl.float32)
    s = sigmoid(gate)
    target = out + row.to(tl.int64)[:, None] * (2 * F) + c
    tl.store(target, (g * up * (s * (1.0 + gate * (1.0 - s)))).to(out.dtype.element_ty), mask=here)
    tl.store(target + F, (g * (gate * s)).to(out.dtype.element_ty), mask=here)


@triton.jit
def sigmoid_gate_kernel(x, gate, y, count, x_inner, x_outer, x_step, g_inner, g_outer, g_step, D: tl.constexpr, R: tl.constexpr,
                        BLOCK: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """``ONE``: a row has a single gate."""
    row, c, here = _tile(count, D, R, BLOCK)
    v = tl.load(x + row_offset(row, x_inner, x_outer, x_step)[:, None] + c, mask=here, other=0.0).to(tl.float32)
    at = row_offset(row, g_inner, g_outer, g_step)[:, None] + (c * 0 if ONE else c)
    s = sigmoid(tl.load(gate + at, mask=here, other=0.0).to(tl.float32))
    tl.store(y + row.to(tl.int64)[:, None] * D + c, (v * s).to(y.dtype.element_ty), mask=here)


@triton.jit
def sigmoid_gate_grad_kernel(grad, x, gate, grad_x, grad_gate, count, x_inner, x_outer, x_step, g_inner, g_outer, g_step,
                             D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, ONE: tl.constexpr):  # fmt: skip
    """All columns of R rows per program: the gradient of a single gate is a sum over its row."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    packed = row.to(tl.int64)[:, None] * D
    source = x + row_offset(row, x_inner, x_outer, x_step)[:, None]
    gates = gate + row_offset(row, g_inner, g_outer, g_step)[:, None]
    total = tl.zeros([R, BLOCK], dtype=tl.float32)
    for first in range(0, D, BLOCK):
        c = first + tl.arange(0, BLOCK)[None, :]
        here = (row < count)[:, None] & (c < D)
        v = tl.load(source + c, mask=here, other=0.0).to(tl.float32)
        g = tl.load(grad + packed + c, mask=here, other=0.0).to(tl.float32)
        s = sigmoid(tl.load(gates + (c * 0 if ONE else c), mask=here, other=0.0).to(tl.float32))
        tl.store(grad_x + packed + c, (g * s).to(grad_x.dtype.element_ty), mask=here)
        dz = g * v * (s * (1.0 - s))
        if ONE:
            total += dz
        else:
            tl.store(grad_gate + packed + c, dz.to(grad_gate.dtype.element_ty), mask=here)
    if ONE:
        tl.store(grad_gate + row, tl.sum(total, 1).to(grad_gate.dtype.element_ty), mask=row < count)


def _grid(count: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid and tile of a launch over ``count`` rows of ``width``. Elementwise: the tile moves no bit."""
    block = min(power_of_two(width), _TILE)
    tile = {"R": _TILE // block, "BLOCK": block, "num_warps": 8}
    return (triton.cdiv(count, tile["R"]), triton.cdiv(width, block)), {**tile, **COMPILE}


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        F, source = gate_up.shape[-1] // 2, rows_of(gate_up)
        y = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
        if y.numel():
            grid, tile = _grid(source.count, F)
            silu_mul_kernel[grid](source.x, y, source.count, *source.address, F, **tile)
        return y

    @staticmethod
    def backward(ctx, grad):
        return silu_mul_grad(grad, *ctx.saved_tensors)


def silu_mul_grad(grad, gate_up):
    """Gradient of :func:`silu_mul` with respect to ``gate_up`` [..., 2 F]."""
    F, source = gate_up.shape[-1] // 2, rows_of(gate_up)
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        grid, tile = _grid(source.count, F)
        silu_mul_grad_kernel[grid](grad.contiguous(), source.x, out, source.count, *source.address, F, **tile)
    return out


def silu_mul(gate_up):
    if gate_up.dtype != torch.bfloat16 or gate_up.shape[-1] % 2:
        raise ContractError(f"activation.silu_mul: expected [..., 2 F] bf16, found {tuple(gate_up.shape)} {gate_up.dtype}")
    return _SiluMul.apply(gate_up)


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if y.numel():
            xs, gs, D = rows_of(x), rows_of(gate), x.shape[-1]
            grid, tile = _grid(xs.count, D)
            sigmoid_gate_kernel[grid](xs.x, gs.x, y, xs.count, *xs.address, *gs.address, D, ONE=gate.shape != x.shape, **tile)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        grad_x, grad_gate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
        if x.numel():
            xs, gs, D = rows_of(x), rows_of(gate), x.shape[-1]
            (programs, _), tile = _grid(xs.count, D)
            sigmoid_gate_grad_kernel[programs,](grad.contiguous(), xs.x, gs.x, grad_x, grad_gate, xs.count, *xs.address, *gs.address, D,
                                                ONE=gate.shape != x.shape, **tile)  # fmt: skip
        return grad_x, grad_gate


def sigmoid_gate(x, gate):
    if x.dtype != torch.bfloat16 or gate.dtype != torch.bfloat16 or gate.shape not in (x.shape, (*x.shape[:-1], 1)):
        raise ContractError(
            f"activation.sigmoid_gate: expected x [..., D] bf16 and a gate [..., D] or [..., 1] bf16, found {tuple(x.shape)} {x.dtype} and "
            f"{tuple(gate.shape)} {gate.dtype}; expand the gate before the call"
        )
    return _SigmoidGate.apply(x, gate)
