"""What every implementation of a mixture of experts refuses."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops._core.expect import BF16, FP32, tensor

SCORING = ("softmax", "sigmoid")
_INT64 = (torch.int64,)  # the kernels read expert ids by address


def check_route(logits, *, top_k, renormalize, scoring="softmax", expert_bias=None, scale=1.0, n_group=1, topk_group=1) -> None:
    """Raises ContractError unless logits are [T, E] fp32, expert_bias [E] fp32 or None, and the settings fit E experts."""
    tensor("moe.route", "logits", logits, FP32, "T", "E")
    experts = logits.shape[1]
    if not 1 <= top_k <= experts:
        raise ContractError(f"op moe.route: top_k {top_k} is outside 1..{experts}, the number of experts")
    if scoring not in SCORING:
        raise ContractError(f"op moe.route: scoring {scoring!r} is unknown; expected one of {SCORING}")
    if expert_bias is not None and scoring != "sigmoid":
        raise ContractError(f"op moe.route: expert_bias needs scoring 'sigmoid', found {scoring!r}; the bias would move softmax's sum")
    if expert_bias is not None:
        tensor("moe.route", "expert_bias", expert_bias, FP32, experts)
    if n_group != 1:
        _check_groups(experts, top_k, scoring, n_group, topk_group)


def _check_groups(experts: int, top_k: int, scoring: str, n_group: int, topk_group: int) -> None:
    if scoring != "sigmoid":
        raise ContractError(f"op moe.route: n_group {n_group} needs scoring 'sigmoid', found {scoring!r}")
    if n_group < 1 or experts % n_group or experts < 2 * n_group:
        raise ContractError(f"op moe.route: n_group {n_group}: expected groups of two or more of the {experts} experts; check the config")
    if not 1 <= topk_group <= n_group or top_k > topk_group * (experts // n_group):
        raise ContractError(
            f"op moe.route: topk_group {topk_group}: expected at most n_group {n_group}, and that the groups that stay hold top_k {top_k} "
            f"experts or more; check the config"
        )


def check_dispatch(x, weights, experts, *, ep=None) -> None:
    """Raises ContractError unless x is [T, D] bf16, weights [T, k] fp32 and experts [T, k] int64."""
    tensor("moe.dispatch", "x", x, BF16, "T", "D")
    tensor("moe.dispatch", "weights", weights, FP32, x.shape[0], "k")
    tensor("moe.dispatch", "experts", experts, _INT64, *weights.shape)


def check_expert_mlp(x, experts, gate_up, down, *, ep=None) -> None:
    """Raises ContractError unless x is [T, D] bf16, experts [T, k] int64, and gate_up and down are E' matrices [2 F, D] and [D, F], bf16,
    stacked or a sequence."""
    op = "moe.expert_mlp"
    tensor(op, "x", x, BF16, "T", "D")
    tensor(op, "experts", experts, _INT64, x.shape[0], "k")
    held = _check_matrices(op, "gate_up", gate_up, "2 F", x.shape[1])
    found = _check_matrices(op, "down", down, x.shape[1], gate_up[0].shape[0] // 2)
    if found != held:
        raise ContractError(f"op {op}: down: expected the matrices of {held} experts, as in gate_up, found {found}; pass all that the rank holds")


def _check_matrices(op: str, name: str, weights, *shape) -> int:
    """How many matrices of ``shape`` there are, one at least."""
    if not isinstance(weights, (list, tuple)):
        tensor(op, name, weights, BF16, "E'", *shape)
    elif weights:
        tensor(op, name, weights[0], BF16, *shape)
        for each in weights[1:]:
            if getattr(each, "shape", None) != weights[0].shape or each.dtype != weights[0].dtype:
                tensor(op, name, each, (weights[0].dtype,), *weights[0].shape)
    if not len(weights):
        raise ContractError(f"op {op}: {name}: expected the matrices of one expert or more, found none; pass all that the rank holds")
    return len(weights)


def check_combine(values, weights, experts, shared=None, *, num_experts, combine_groups, rows=None, ep=None) -> None:
    """Raises ContractError unless values are [T', k, D] bf16, weights [T', k] fp32, experts [T', k] int64, and shared [T, D] bf16 or None."""
    op = "moe.combine"
    tensor(op, "values", values, BF16, "T'", "k", "D")
    tensor(op, "weights", weights, FP32, *values.shape[:2])
    tensor(op, "experts", experts, _INT64, *values.shape[:2])
    if shared is not None:
        tensor(op, "shared", shared, BF16, "T" if rows else values.shape[0], values.shape[2])
