"""Layouts of either side: which of them have the bits of one process, by their degrees and the sizes of the model alone."""

from __future__ import annotations

from dataclasses import dataclass

from isoexec.contract.errors import ContractError
from isoexec.contract.settings import Setting, check_settings
from isoexec.contract.types import Claims, Numerics

CONTEXT = Setting("context_parallel_size", (1,), "no layer fetches keys, values or states of the other ranks")
EXPERT_TENSOR = Setting("expert_tensor_parallel_size", (1,), "the K of an expert's matrices is never split")

#: (claim without its side, degree): the degree in use must not exceed the claim.
_DEGREES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("ep", "expert_model_parallel_size"),
)


@dataclass(frozen=True)
class Layout:
    """Degrees, and the sizes that bound them, by the names that they have in Megatron's ``TransformerConfig``.

    Attributes:
        num_layers, num_query_groups: layers; key/value heads.
        num_moe_experts: routed experts of a sparse layer, or None.
        linear_num_key_heads: key heads of a Gated DeltaNet layer, or None.
    """

    num_layers: int
    num_query_groups: int
    num_moe_experts: int | None = None
    linear_num_key_heads: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False

    def claims(self) -> Claims:
        """The smallest claims that cover this layout of the trainer, and an engine of one process."""
        degrees = {f"trainer_{claim}": getattr(self, field) for claim, field in _DEGREES}
        return Claims(**degrees, trainer_sp=self.sequence_parallel)


def check_claims(claims: Claims, layout, where: str = "") -> None:
    """Refuse a trainer's degree beyond its claim.

    Args:
        layout: :class:`Layout`, or Megatron's ``TransformerConfig``.
        where: text before the name of a degree.

    Raises:
        ContractError: names the degree, its claim, what was found and what to do.
    """
    _check_degrees_claimed("trainer", claims, layout, where)
    if layout.tensor_model_parallel_size > 1 and layout.sequence_parallel and not claims.trainer_sp:
        raise ContractError(
            f"{where}sequence_parallel: the contract claims false (claims.trainer_sp), found True; switch it off, or build a contract that "
            "claims it"
        )


def _check_degrees_claimed(side: str, claims: Claims, layout, where: str) -> None:
    for name, field in _DEGREES:
        claim, used = f"{side}_{name}", getattr(layout, field)
        if used > (claimed := getattr(claims, claim)):
            raise ContractError(
                f"{where}{field}: the contract claims at most {claimed} (claims.{claim}), found {used}; lower it, or build a contract "
                "with the larger claim"
            )


def check_engine(claims: Claims, numerics: Numerics, layout: Layout, where: str = "") -> None:
    """Refuse ranks of an engine that are not claimed, or would not hold whole heads, subtrees of the leaves and groups of the combine.

    Args:
        layout: the engine's; its ranks share out tensors and whole experts.
        where: see :func:`check_claims`.

    Raises:
        ContractError: names the degree, what was expected, what was found and what to do.
    """
    _check_degrees_claimed("engine", claims, layout, where)
    check_degrees(numerics, layout, where, replicated=True)
    check_sizes(layout, layout.tensor_model_parallel_size, where)


def check_sizes(layout: Layout, ranks: int, where: str = "") -> None:
    """Refuse a layout of which Megatron could not build the model, with a contract or without.

    Args:
        ranks: processes of the trainer.
        where: see :func:`check_claims`.

    Raises:
        ContractError: names the degree, what was expected, what was found and what to do.
    """
    if layout.num_layers % layout.pipeline_model_parallel_size:
        raise ContractError(
            f"{where}pipeline_model_parallel_size: expected a divisor of the {layout.num_layers} layers, found "
            f"{layout.pipeline_model_parallel_size}; lower it"
        )
    if layout.linear_num_key_heads is not None:
        _check_heads(layout.linear_num_key_heads, "key heads of Gated DeltaNet", layout.tensor_model_parallel_size, where)
    if layout.num_moe_experts is None:
        if layout.expert_model_parallel_size > 1:
            raise ContractError(
                f"{where}expert_model_parallel_size: expected 1 for a model without experts, found {layout.expert_model_parallel_size}; "
                "set it to 1"
            )
        return
    share = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size * layout.pipeline_model_parallel_size
    if ranks % share:
        raise ContractError(
            f"{where}expert_model_parallel_size: {layout.expert_model_parallel_size} x expert_tensor_parallel_size "
            f"{layout.expert_tensor_parallel_size} x pipeline_model_parallel_size {layout.pipeline_model_parallel_size}: expected a "
            f"divisor of the {ranks} ranks of the policy; lower one of them"
        )


def check_degrees(numerics: Numerics, layout, where: str = "", replicated: bool = False) -> None:
    """Refuse a layout whose ranks would not hold whole heads, whole subtrees of the leaves and whole groups of the combine.

    Args:
        layout, where: see :func:`check_claims`.
        replicated: every expert-parallel rank holds the same tokens, as in an engine.

    Raises:
        ContractError: names the degree, what it has to divide, what was found and what to do.
    """
    check_settings((CONTEXT,), layout, where)
    _check_tensor_parallel(numerics, layout, where)
    if layout.num_moe_experts is None:
        return
    _check_experts(numerics, layout, where)
    if layout.tensor_model_parallel_size > 1 and not (layout.sequence_parallel or replicated):
        raise ContractError(
            f"{where}sequence_parallel: expected True with experts under tensor parallelism, found False: every rank would train the "
            "experts on the same tokens; switch it on"
        )


def _check_tensor_parallel(numerics: Numerics, layout, where: str) -> None:
    degree = layout.tensor_model_parallel_size
    if degree == 1:
        return
    if numerics.row_leaves % degree:
        raise ContractError(
            f"{where}tensor_model_parallel_size: expected a divisor of numerics.row_leaves {numerics.row_leaves}, found {degree}"
        )
    _check_heads(layout.num_query_groups, "key/value heads", degree, where)


def _check_heads(count: int, kind: str, degree: int, where: str) -> None:
    if count % degree:
        raise ContractError(
            f"{where}tensor_model_parallel_size: expected a divisor of the {count} {kind}, found {degree}: "
            "heads are not split between ranks; lower it"
        )


def _check_experts(numerics: Numerics, layout, where: str) -> None:
    check_settings((EXPERT_TENSOR,), layout, where)
    groups = numerics.combine_groups
    if layout.num_moe_experts % groups or groups % layout.expert_model_parallel_size:
        raise ContractError(
            f"{where}expert_model_parallel_size: expected a divisor of numerics.combine_groups {groups}, and that one of "
            f"{layout.num_moe_experts} experts, found {layout.expert_model_parallel_size}; lower it, or build the contract from the "
            "checkpoint"
        )
