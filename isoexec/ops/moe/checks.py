"""What every implementation of the router refuses."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops.moe import SCORING


def check_route(experts: int, top_k: int, scoring: str, expert_bias, n_group: int, topk_group: int) -> None:
    """Raises ContractError for arguments of :func:`isoexec.ops.moe.route` that do not fit ``experts``."""
    if not 1 <= top_k <= experts:
        raise ContractError(f"op moe.route: top_k {top_k} is outside 1..{experts}, the number of experts")
    if scoring not in SCORING:
        raise ContractError(f"op moe.route: scoring {scoring!r} is unknown; expected one of {SCORING}")
    if expert_bias is not None and scoring != "sigmoid":
        raise ContractError(f"op moe.route: expert_bias needs scoring 'sigmoid', found {scoring!r}; the bias would move softmax's sum")
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
