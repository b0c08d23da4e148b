"""Which Megatron settings a contract allows: one table, checked when a model is built.

Fusion switches (``bias_dropout_fusion``, ``apply_rope_fusion``, ``masked_softmax_fusion``, ...) are not listed: they choose between
upstream implementations that no layer of ours runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from isoexec.contract import ContractError, ExecutionContract
from isoexec.contract.layouts import CONTEXT, EXPERT_TENSOR, check_claims, check_degrees
from isoexec.contract.settings import UNROUTED, Setting, check_settings
from isoexec.runtimes import activation

_OTHER = "the architecture would be another one"

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
    CONTEXT,
    Setting("mtp_num_layers", (None, 0), UNROUTED),
    Setting("use_mup", (False,), UNROUTED),
    Setting("heterogeneous_block_specs", (False,), "layers would differ"),
)

#: What every architecture of ours has in common.
_DECODER = (
    Setting("normalization", ("RMSNorm",), _OTHER),
    Setting("qk_layernorm", (True,), _OTHER),
    Setting("qk_l2_norm", (False,), _OTHER),
    Setting("gated_linear_unit", (True,), _OTHER),
    Setting("activation_func", (F.silu,), _OTHER),
    Setting("activation_func_clamp_value", (None,), _OTHER),
    Setting("glu_linear_offset", (0.0,), _OTHER),
    Setting("add_bias_linear", (False,), _OTHER),
    Setting("add_qkv_bias", (False,), _OTHER),
    Setting("softmax_scale", (None,), _OTHER),
    Setting("softmax_type", ("vanilla",), _OTHER),
    Setting("window_size", (None,), _OTHER),
    Setting("no_rope_freq", (None,), _OTHER),
    Setting("rotary_interleaved", (False,), _OTHER),
    Setting("apply_residual_connection_post_layernorm", (False,), _OTHER),
)

_QWEN3 = (
    *_DECODER,
    Setting("multi_latent_attention", (False,), _OTHER),
    Setting("layernorm_zero_centered_gamma", (False,), _OTHER),
    Setting("attention_output_gate", (False,), _OTHER),
    Setting("experimental_attention_variant", (None,), _OTHER),
)

_HYBRID = (
    *_DECODER,
    Setting("multi_latent_attention", (False,), _OTHER),
    Setting("layernorm_zero_centered_gamma", (True,), "the checkpoint's norm weights would be read as w, not 1 + w"),
    Setting("attention_output_gate", (True,), _OTHER),
    Setting("experimental_attention_variant", ("gated_delta_net",), _OTHER),
)

_LATENT = (
    *_DECODER,
    Setting("multi_latent_attention", (True,), _OTHER),
    Setting("rope_type", ("rope",), "angles would be those of YaRN"),
    Setting("rotary_percent", (1.0,), _OTHER),
    Setting("cache_mla_latents", (False,), "keys and values would be absorbed into the products"),
    Setting("mla_down_proj_fusion", (False,), "the down-projections are two parameters"),
    Setting("layernorm_zero_centered_gamma", (False,), _OTHER),
    Setting("attention_output_gate", (False,), _OTHER),
    Setting("experimental_attention_variant", (None,), _OTHER),
)

_NO_EXPERTS = (Setting("num_moe_experts", (None,), _OTHER),)

_EXPERTS = (
    EXPERT_TENSOR,
    Setting("moe_router_load_balancing_type", ("none", "aux_loss"), "the router would choose, or be trained, otherwise"),
    Setting("moe_router_force_load_balancing", (False,), "tokens would be routed at random"),
    Setting("moe_router_force_biased", (None,), "tokens would be routed at random"),
    Setting("moe_enable_routing_replay", (False,), "the router op computes the route, equal to the engine's"),
    Setting("moe_z_loss_coeff", (None,), "it is not attached to the router op"),
    Setting("moe_input_jitter_eps", (None,), "the trainer would route another input"),
    Setting("moe_expert_capacity_factor", (None,), "the trainer would drop tokens"),
    Setting("moe_expert_rank_capacity_factor", (None,), "the trainer would drop tokens"),
    Setting("moe_token_dropping", (False,), "the trainer would drop tokens"),
    Setting("moe_apply_probs_on_input", (False,), "weights are applied to the experts' outputs"),
    Setting("moe_latent_size", (None,), _OTHER),
    Setting("moe_mlp_glu_interleave_size", (None,), "gate and up rows would be interleaved"),
    Setting("moe_grouped_gemm", (False,), "experts hold one matrix each, and the grouped product is an op"),
    Setting("moe_shared_expert_overlap", (False,), "its streams would not be waited for"),
    Setting("overlap_moe_expert_parallel_comm", (False,), "the schedule would not run whole layers"),
)

_SOFTMAX_ROUTER = (
    Setting("moe_router_score_function", ("softmax",), _OTHER),
    Setting("moe_router_enable_expert_bias", (False,), "the engine's router has no bias"),
    Setting("moe_router_topk_scaling_factor", (None, 1.0), _OTHER),
    Setting("moe_router_num_groups", (None,), _OTHER),
    Setting("moe_router_group_topk", (None,), _OTHER),
)

_SIGMOID_ROUTER = (
    Setting("moe_router_score_function", ("sigmoid",), _OTHER),
    Setting("moe_router_enable_expert_bias", (True,), "the engine's router has a bias"),
    Setting("moe_router_pre_softmax", (False,), "its router always renormalises"),
    Setting("moe_shared_expert_gate", (False,), _OTHER),
)

_SHARED_EXPERT = (
    Setting("moe_shared_expert_gate", (True,), _OTHER),
    Setting("moe_router_pre_softmax", (False,), "its router always renormalises"),
)

#: HF architecture -> fields that make a Megatron model that architecture.
ARCHITECTURES: dict[str, tuple[Setting, ...]] = {
    "Qwen3ForCausalLM": _QWEN3 + _NO_EXPERTS,
    "Qwen3MoeForCausalLM": (*_QWEN3, *_EXPERTS, *_SOFTMAX_ROUTER, Setting("moe_shared_expert_intermediate_size", (None,), _OTHER)),
    "Qwen3_5ForCausalLM": _HYBRID + _NO_EXPERTS,
    "Qwen3_5ForConditionalGeneration": _HYBRID + _NO_EXPERTS,
    "Qwen3_5MoeForCausalLM": _HYBRID + _EXPERTS + _SOFTMAX_ROUTER + _SHARED_EXPERT,
    "Qwen3_5MoeForConditionalGeneration": _HYBRID + _EXPERTS + _SOFTMAX_ROUTER + _SHARED_EXPERT,
    "Glm4MoeLiteForCausalLM": _LATENT + _EXPERTS + _SIGMOID_ROUTER,
}

#: Architectures whose rotary embedding turns part of a head.
PARTIAL_ROPE = tuple(name for name in ARCHITECTURES if name.startswith("Qwen3_5"))


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
    check_settings(COMMON + ARCHITECTURES[contract.architecture], config)
    check_claims(contract.claims, config)
    check_degrees(contract.numerics, config)


def activate(contract: ExecutionContract, config) -> None:
    """:func:`check`, and :func:`isoexec.runtimes.activation.activate`."""
    check(contract, config)
    activation.activate(contract, "trainer")
