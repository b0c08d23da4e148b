"""vLLM's norm, rotary, activation and sum kernels from its compiled extensions, without importing vLLM, under the names that bench/ uses.

A folder holds ``vllm/_C_stable_libtorch.abi3.so`` and ``vllm/_moe_C.abi3.so`` of the release.
"""

from __future__ import annotations

from pathlib import Path

import torch


def load(folder) -> None:
    """Registers torch.ops._C and torch.ops._moe_C."""
    for name in ("_C_stable_libtorch", "_moe_C"):
        torch.ops.load_library(Path(folder, "vllm", f"{name}.abi3.so"))


def rms_norm(x, weight, eps):
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, eps)
    return out


def fused_add_rms_norm(x, residual, weight, eps):
    """In place: x becomes the norm of residual + x, residual the sum."""
    torch.ops._C.fused_add_rms_norm(x, residual, weight, eps)
    return x


def silu_and_mul(x):
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    torch.ops._C.silu_and_mul(out, x)
    return out


def rotate(positions, q, k, head_size, cos_sin):
    """In place; cos_sin [positions, rotary size]; k may be None."""
    torch.ops._C.rotary_embedding(positions, q, k, head_size, cos_sin, True)
    return q


def sum_experts(values):
    """Sum [T, D] of values [T, k, D], which vLLM's experts have weighted already."""
    out = torch.empty(values.shape[0], values.shape[2], dtype=values.dtype, device=values.device)
    torch.ops._moe_C.moe_sum(values, out)
    return out
