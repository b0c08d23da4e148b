"""RMS norms of the CPU backend, with explicit gradients (roundings are passed straight through)."""

from __future__ import annotations

import torch

from isoexec.ops._core import math
from isoexec.ops._core.rowsum import row_sum


def residual_add(x, residual):
    # Autograd of the conversions gives both inputs the gradient as it is.
    return (x.float() + residual.float()).to(x.dtype)


def _normalise(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 (x * r, r) with r = rsqrt(mean(x^2) + eps) of each row."""
    x = x.float()
    r = math.rsqrt(row_sum(x * x) / x.shape[-1] + eps).unsqueeze(-1)
    return x * r, r


class _RmsNorm(torch.autograd.Function):
    """y = bf16(n * (weight + shift)), n = x * r; ``inner`` rounds n to bf16 before the weight."""

    @staticmethod
    def forward(ctx, x, weight, eps, shift, inner):
        n, r = _normalise(x, eps)
        ctx.save_for_backward(x, weight, r)
        ctx.shift = shift
        if inner:
            n = n.to(x.dtype).float()
        scale = weight.float() + shift if shift else weight.float()
        return (n * scale).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        g, n = grad.float(), x.float() * r
        grad_weight = (g * n).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return _norm_grad(g * (weight.float() + ctx.shift), n, r).to(x.dtype), grad_weight, None, None, None


def _norm_grad(g, n, r):
    """Gradient with respect to x of n = x * r, given ``g`` with respect to n."""
    return r * (g - n * (g * n).mean(-1, keepdim=True))


def rms_norm(x, weight, eps):
    return _RmsNorm.apply(x, weight, eps, 0.0, True)


def zero_centered_rms_norm(x, weight, eps):
    return _RmsNorm.apply(x, weight, eps, 1.0, False)


def add_rms_norm(x, residual, weight, eps):
    residual = residual_add(x, residual)
    return rms_norm(residual, weight, eps), residual


def add_zero_centered_rms_norm(x, residual, weight, eps):
    residual = residual_add(x, residual)
    return zero_centered_rms_norm(residual, weight, eps), residual


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, weight, eps):
        n, r = _normalise(x, eps)
        ctx.save_for_backward(x, gate, weight, r)
        return (n * weight.float() * math.silu(gate.float())).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, gate, weight, r = ctx.saved_tensors
        g, n, z, w = grad.float(), x.float() * r, gate.float(), weight.float()
        s = torch.sigmoid(z)
        grad_gate = g * n * w * (s * (1.0 + z * (1.0 - s)))
        g = g * (z * s)
        grad_weight = (g * n).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None
        return _norm_grad(g * w, n, r).to(x.dtype), grad_gate.to(gate.dtype), grad_weight, None


def gated_rms_norm(x, gate, weight, eps):
    return _GatedRmsNorm.apply(x, gate, weight, eps)
