"""What every implementation of a matrix product refuses."""

from __future__ import annotations

from isoexec.contract import ContractError


def check_k(op: str, x, weight) -> None:
    """Raises ContractError where the operands [..., K] and [N, K] hold other numbers of K."""
    if x.shape[-1] != weight.shape[-1]:
        raise ContractError(f"{op}: x has K = {x.shape[-1]}, weight has K = {weight.shape[-1]}; pass matching shards of K")
    if not x.shape[-1]:
        raise ContractError(f"{op}: K = 0; expected at least one channel")


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
