"""What every implementation of a norm refuses."""

from __future__ import annotations

from isoexec.ops._core.expect import BF16, FP32, tensor


def check_norm(op: str, x, weight, eps, weights=BF16) -> None:
    """Raises ContractError unless x is [..., D] bf16 and weight [D] of one of the dtypes ``weights``."""
    tensor(op, "x", x, BF16, ..., "D")
    tensor(op, "weight", weight, weights, x.shape[-1])


def check_pair(op: str, x, residual) -> None:
    """Raises ContractError unless both are bf16 of one shape."""
    tensor(op, "x", x, BF16, ..., "D")
    tensor(op, "residual", residual, BF16, *x.shape)


def check_add_norm(op: str, x, residual, weight, eps) -> None:
    check_norm(op, x, weight, eps)
    check_pair(op, x, residual)


def check_gated(x, gate, weight, eps) -> None:
    check_norm("norm.gated_rms_norm", x, weight, eps, BF16 + FP32)
    tensor("norm.gated_rms_norm", "gate", gate, BF16, *x.shape)
