"""Which Megatron settings a contract allows: one table, checked when a model is built.

Fusion switches (``bias_dropout_fusion``, ``apply_rope_fusion``, ``masked_softmax_fusion``, ...) are not listed: they choose between
upstream implementations that no layer of ours runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from isoexec.contract import ContractError, ExecutionContract


class Setting(NamedTuple):
    """A ``TransformerConfig`` field, the values that keep the contract and what another value would do."""

    field: str
    allowed: tuple
    otherwise: str


_QWEN3 = "the architecture would not be Qwen3"
_UNROUTED = "arithmetic outside the op library"

#: Fields that must hold whatever the architecture.
COMMON = (
    Setting("params_dtype", (torch.bfloat16,), "parameters would be rounded elsewhere than in the engine"),
    Setting("fp16", (False,), "activations would be fp16"),
    Setting("fp8", (None, False), "matrix products would be quantised"),
    Setting("fp4", (None, False), "matrix products would be quantised"),
    Setting("enable_autocast", (False,), "autocast moves rounding points"),
    Setting("pipeline_dtype", (None, torch.bfloat16), "activations would change dtype between stages"),
    Setting("hidden_dropout", (0.0,), "the trainer would sample another policy"),
    Setting("attention_dropout", (0.0,), "the trainer would sample another policy"),
    Setting("fp32_residual_connection", (False,), "the residual stream is bf16 in the engine"),
    Setting("recompute_granularity", (None, "full"), "parts of a layer cannot be recomputed apart from it"),
    Setting("gradient_accumulation_fusion", (False,), "weight gradients come from autograd, not from a fused product"),
    Setting("defer_embedding_wgrad_compute", (False,), "weight gradients come from autograd"),
    Setting("cpu_offloading", (False,), "offload hooks are not called by the layers"),
    Setting("fine_grained_activation_offloading", (False,), "offload hooks are not called by the layers"),
    Setting("cuda_graph_impl", ("none",), "captured graphs replay without the op registry"),
    Setting("mtp_num_layers", (None, 0), _UNROUTED),
    Setting("use_mup", (False,), _UNROUTED),
    Setting("heterogeneous_block_specs", (False,), "layers would differ"),
)

#: HF architecture -> fields that make a Megatron model that architecture.
ARCHITECTURES: dict[str, tuple[Setting, ...]] = {
    "Qwen3ForCausalLM": (
        Setting("normalization", ("RMSNorm",), _QWEN3),
        Setting("layernorm_zero_centered_gamma", (False,), _QWEN3),
        Setting("qk_layernorm", (True,), _QWEN3),
        Setting("qk_l2_norm", (False,), _QWEN3),
        Setting("gated_linear_unit", (True,), _QWEN3),
        Setting("activation_func", (F.silu,), _QWEN3),
        Setting("activation_func_clamp_value", (None,), _QWEN3),
        Setting("glu_linear_offset", (0.0,), _QWEN3),
        Setting("add_bias_linear", (False,), _QWEN3),
        Setting("add_qkv_bias", (False,), _QWEN3),
        Setting("attention_output_gate", (False,), _QWEN3),
        Setting("softmax_scale", (None,), _QWEN3),
        Setting("softmax_type", ("vanilla",), _QWEN3),
        Setting("window_size", (None,), _QWEN3),
        Setting("no_rope_freq", (None,), _QWEN3),
        Setting("rotary_interleaved", (False,), _QWEN3),
        Setting("multi_latent_attention", (False,), _QWEN3),
        Setting("experimental_attention_variant", (None,), _QWEN3),
        Setting("num_moe_experts", (None,), _QWEN3),
        Setting("apply_residual_connection_post_layernorm", (False,), _QWEN3),
    ),
}

#: (claim, config field): the degree in use must not exceed the claim.
_DEGREES = (
    ("trainer_tp", "tensor_model_parallel_size"),
    ("trainer_pp", "pipeline_model_parallel_size"),
    ("trainer_cp", "context_parallel_size"),
    ("trainer_ep", "expert_model_parallel_size"),
)


def check(contract: ExecutionContract, config) -> None:
    """Refuse a model whose bits the contract does not cover.

    Args:
        contract: the contract of this process.
        config: Megatron ``TransformerConfig``.

    Raises:
        ContractError: names the setting, what was expected, what was found and what to do.
    """
    if contract.architecture not in ARCHITECTURES:
        raise ContractError(
            f"architecture: the Megatron runtime runs {', '.join(ARCHITECTURES)}, the contract names {contract.architecture}; "
            "build the contract for one of these"
        )
    backend = "cuda" if torch.cuda.is_available() else "cpu"
    if contract.backend != backend:
        raise ContractError(
            f"backend: the contract names {contract.backend!r}, this process computes on {backend!r}; build a contract for this "
            "backend (bits are promised within one)"
        )
    for setting in COMMON + ARCHITECTURES[contract.architecture]:
        _check_setting(setting, getattr(config, setting.field))
    for claim, field in _DEGREES:
        claimed, used = getattr(contract.claims, claim), getattr(config, field)
        if used > claimed:
            raise ContractError(
                f"{field}: the contract claims at most {claimed} (claims.{claim}), found {used}; lower it, or build a contract "
                "with the larger claim"
            )
    _check_tensor_parallel(contract, config)


def _check_setting(setting: Setting, found) -> None:
    if not any(found is value or (type(found) is type(value) and found == value) for value in setting.allowed):
        expected = " or ".join(map(_name, setting.allowed))
        raise ContractError(
            f"{setting.field}: expected {expected}, found {_name(found)}: {setting.otherwise}; set it to {_name(setting.allowed[0])}, "
            "or unset ISOEXEC_CONTRACT to run upstream's kernels"
        )


def _check_tensor_parallel(contract: ExecutionContract, config) -> None:
    degree = config.tensor_model_parallel_size
    if degree == 1:
        return
    if contract.numerics.row_leaves % degree:
        raise ContractError(
            f"tensor_model_parallel_size: expected a divisor of numerics.row_leaves {contract.numerics.row_leaves}, found {degree}"
        )
    if config.num_query_groups % degree:
        raise ContractError(
            f"tensor_model_parallel_size: expected a divisor of the {config.num_query_groups} key/value heads, found {degree}: "
            "heads are not split between ranks; lower it"
        )
    if config.sequence_parallel and not contract.claims.trainer_sp:
        raise ContractError(
            "sequence_parallel: the contract claims false (claims.trainer_sp), found True; switch it off, or build a contract that claims it"
        )


def _name(value) -> str:
    return getattr(value, "__name__", None) or repr(value)


def activate(contract: ExecutionContract, config) -> None:
    """:func:`check`, then prepare the process: one torch thread on the CPU, where a second one would split reductions."""
    check(contract, config)
    if contract.backend == "cpu":
        torch.set_num_threads(1)
