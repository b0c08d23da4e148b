"""Gated activations of the CPU backend. Gradients recompute the sigmoid, so that only the inputs are kept."""

from __future__ import annotations

import torch

from isoexec.ops._core import math


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.float().chunk(2, -1)
        return (math.silu(gate) * up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, -1)
        g, s = grad.float(), torch.sigmoid(gate)
        grad_gate = g * up * (s * (1.0 + gate * (1.0 - s)))
        return torch.cat([grad_gate, g * (gate * s)], -1).to(gate_up.dtype)


def silu_mul(gate_up):
    return _SiluMul.apply(gate_up)


class _SigmoidGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return (x.float() * math.sigmoid(gate.float())).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        g, s = grad.float(), torch.sigmoid(gate.float())
        grad_gate = (g * x.float() * (s * (1.0 - s))).sum_to_size(gate.shape)
        return (g * s).to(x.dtype), grad_gate.to(gate.dtype)


def sigmoid_gate(x, gate):
    return _SigmoidGate.apply(x, gate)
