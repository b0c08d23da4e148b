"""What every implementation of a matrix product refuses."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops._core.expect import BF16, tensor


def check_operands(op: str, x, weight, bias=None) -> None:
    """Raises ContractError unless x is [..., T, K], weight [N, K] and bias [N] or None, bf16, of the same K > 0."""
    tensor(op, "x", x, BF16, ..., "T", "K")
    tensor(op, "weight", weight, BF16, "N", "K")
    if x.shape[-1] != weight.shape[1]:
        raise ContractError(f"op {op}: x has K = {x.shape[-1]}, weight has K = {weight.shape[1]}; pass matching shards of K")
    if not x.shape[-1]:
        raise ContractError(f"op {op}: K = 0; expected at least one channel")
    if bias is not None:
        tensor(op, "bias", bias, BF16, weight.shape[0])


def check_row_parallel(x, weight, *, leaves, tp=None, bias=None) -> None:
    check_operands("matmul.row_parallel_linear", x, weight, bias)


def check_leaves(K: int, leaves: int, ranks: int) -> None:
    """Raises ContractError where ``leaves`` cannot be shared out over ``ranks``, or K not over ``leaves``."""
    if leaves < 1 or leaves & (leaves - 1) or leaves % ranks:
        raise ContractError(
            f"matmul.row_parallel_linear: {leaves} leaves for {ranks} tensor-parallel ranks; expected a power of two that the degree "
            "divides: lower the degree, or build a contract with a larger numerics.row_leaves"
        )
    if K % (leaves if leaves == 1 else 16 * leaves):
        raise ContractError(
            f"matmul.row_parallel_linear: K = {K} is not a multiple of 16 * G = {16 * leaves}; "
            "build a contract whose numerics.row_leaves fits the model"
        )
