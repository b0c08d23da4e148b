"""Which vLLM settings and which requests a contract allows: two tables, checked when an engine is built and when a request arrives."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError, ExecutionContract
from isoexec.contract.checkpoints import check_checkpoint
from isoexec.contract.layouts import Layout, check_engine
from isoexec.contract.settings import UNPROVEN, UNROUTED, Setting, check_settings
from isoexec.runtimes import activation

_DISTRIBUTION = "the logprob returned must be of the distribution sampled, which the trainer computes from the logits alone"

#: Paths into vLLM's ``VllmConfig``.
ENGINE = (
    Setting("model_config.runner_type", ("generate",), "only generation has logprobs"),
    Setting("model_config.model_impl", ("auto", "vllm"), UNROUTED),
    Setting("model_config.dtype", (torch.bfloat16,), "parameters and activations are bf16 in the trainer"),
    Setting("model_config.quantization", (None,), "matrix products would be quantised"),
    Setting("model_config.logprobs_mode", ("processed_logprobs",), _DISTRIBUTION),
    Setting("model_config.logits_processors", (None,), _DISTRIBUTION),
    Setting("model_config.enable_prompt_embeds", (False,), "the trainer computes embeddings from token ids"),
    Setting("cache_config.cache_dtype", ("auto", "bfloat16"), "keys and values would be rounded on their way through the cache"),
    Setting("cache_config.calculate_kv_scales", (False,), "keys and values would be rounded on their way through the cache"),
    Setting("cache_config.sliding_window", (None,), UNPROVEN),
    Setting("cache_config.kv_sharing_fast_prefill", (False,), "prompt logits would be wrong"),
    Setting("lora_config", (None,), "the trainer's weights would not be those sampled with"),
    Setting("speculative_config", (None,), "what is sampled would depend on the draft"),
    Setting("kv_transfer_config", (None,), UNPROVEN),
    Setting("use_v2_model_runner", (False,), "its sampler is not routed; set VLLM_USE_V2_MODEL_RUNNER=0"),
    Setting("parallel_config.pipeline_parallel_size", (1,), UNPROVEN),
    Setting("parallel_config.prefill_context_parallel_size", (1,), "partial attention outputs would be merged"),
    Setting("parallel_config.decode_context_parallel_size", (1,), "partial attention outputs would be merged"),
    Setting("parallel_config.enable_dbo", (False,), UNPROVEN),
    Setting("parallel_config.expert_placement_strategy", ("linear",), "a rank's experts are neighbours, whose groups make a subtree of the combine"),
)

#: Without ``enforce_eager``; vLLM's names of the values.
_GRAPHS = (
    Setting("compilation_config.mode.name", ("NONE",), "compiled graphs fuse ops"),
    Setting("compilation_config.cudagraph_mode.name", ("FULL_DECODE_ONLY",), "decode steps alone are captured whole"),
)
_EAGER = (Setting("model_config.enforce_eager", (True,), "only a GPU has graphs"),)

_TEXT_ONLY = (Setting("model_config.multimodal_config", (None,), UNROUTED),)
_LANGUAGE_MODEL = (
    Setting("model_config.multimodal_config.language_model_only", (True,), "the vision tower is outside the op library"),
    Setting("model_config.multimodal_config.enable_mm_embeds", (False,), "the trainer computes embeddings from token ids"),
)
_HYBRID = (
    Setting("cache_config.mamba_cache_dtype", ("auto", "bfloat16"), "the convolution's window holds bf16 inputs"),
    Setting("cache_config.mamba_ssm_cache_dtype", ("float32", "auto"), "a rounded recurrent state would depend on how a prompt is split"),
    Setting("cache_config.mamba_cache_mode", ("none", "align"), UNPROVEN),
)
_EXPERTS = (
    Setting("parallel_config.enable_eplb", (False,), "experts would move between ranks, and the combine's groups with them"),
    Setting("parallel_config.data_parallel_size", (1,), "vLLM would split each expert over the data-parallel ranks"),
    Setting("kernel_config.moe_backend", (None, "auto"), UNROUTED),
)

_LATENT = (Setting("model_config.use_mla", (False,), "the absorbed form adds in another order than the trainer"),)

#: HF architecture -> paths into vLLM's ``VllmConfig``, beside :data:`ENGINE`.
ENGINE_OF: dict[str, tuple[Setting, ...]] = {
    "Qwen3ForCausalLM": _TEXT_ONLY,
    "Qwen3MoeForCausalLM": _TEXT_ONLY + _EXPERTS,
    "Qwen3_5ForCausalLM": _TEXT_ONLY + _HYBRID,
    "Qwen3_5ForConditionalGeneration": _LANGUAGE_MODEL + _HYBRID,
    "Qwen3_5MoeForCausalLM": _TEXT_ONLY + _HYBRID + _EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _LANGUAGE_MODEL + _HYBRID + _EXPERTS,
    "Glm4MoeLiteForCausalLM": _TEXT_ONLY + _EXPERTS + _LATENT,
}

#: Paths into vLLM's ``SamplingParams``.
REQUEST = (
    Setting("top_p", (1.0,), _DISTRIBUTION),
    Setting("top_k", (0, -1), _DISTRIBUTION),
    Setting("min_p", (0.0,), _DISTRIBUTION),
    Setting("presence_penalty", (0.0,), _DISTRIBUTION),
    Setting("frequency_penalty", (0.0,), _DISTRIBUTION),
    Setting("repetition_penalty", (1.0,), _DISTRIBUTION),
    Setting("min_tokens", (0,), _DISTRIBUTION),
    Setting("logit_bias", (None,), _DISTRIBUTION),
    Setting("allowed_token_ids", (None,), _DISTRIBUTION),
    Setting("bad_words", (None, []), _DISTRIBUTION),
    Setting("structured_outputs", (None,), _DISTRIBUTION),
    Setting("thinking_token_budget", (None,), _DISTRIBUTION),
)


def check(contract: ExecutionContract, config) -> None:
    """Refuse an engine whose bits the contract does not cover.

    Args:
        contract: the contract of this process.
        config: vLLM ``VllmConfig``, complete.

    Raises:
        ContractError: names the setting, what was expected, what was found and what to do.
    """
    if contract.architecture not in ENGINE_OF:
        raise ContractError(
            f"architecture: the vLLM runtime runs {', '.join(ENGINE_OF)}, the contract names {contract.architecture}; "
            "build the contract for one of these"
        )
    from vllm.platforms import current_platform

    if contract.backend != current_platform.device_type:
        raise ContractError(
            f"backend: the contract names {contract.backend!r}, this engine computes on {current_platform.device_type!r}; build a "
            "contract for this backend (bits are promised within one)"
        )
    found = list(config.model_config.architectures)
    if found != [contract.architecture]:
        raise ContractError(
            f"architecture: the contract names {contract.architecture}, the checkpoint {found}; load the model that the contract is for"
        )
    check_settings((*ENGINE, *ENGINE_OF[contract.architecture]), config)
    text_config = config.model_config.hf_text_config
    _check_graphs(contract, config)
    check_checkpoint(contract.architecture, text_config)
    _check_numerics(contract, text_config)
    _check_ranks(contract, config.parallel_config, text_config)


def _check_graphs(contract: ExecutionContract, config) -> None:
    """Decode steps may be captured, where there are graphs."""
    if not config.model_config.enforce_eager:
        check_settings(_EAGER if contract.backend == "cpu" else _GRAPHS, config)


def _check_ranks(contract: ExecutionContract, parallel, text_config) -> None:
    """The ranks of an engine share out heads, leaves and whole experts, each of them as many."""
    degree, experts = parallel.tensor_parallel_size, _experts(text_config)
    if parallel.enable_expert_parallel != (degree > 1 and experts is not None):
        raise ContractError(
            f"parallel_config.enable_expert_parallel: expected {not parallel.enable_expert_parallel} with tensor_parallel_size {degree} and "
            f"{experts or 'no'} experts, found {parallel.enable_expert_parallel}: ranks hold whole experts, since the K of an expert's matrices is "
            "never split"
        )
    sizes = text_config.num_hidden_layers, text_config.num_key_value_heads, experts, getattr(text_config, "linear_num_key_heads", None)
    ranks = Layout(*sizes, tensor_model_parallel_size=degree, expert_model_parallel_size=degree if experts else 1)
    check_engine(contract.claims, contract.numerics, ranks, "engine: ")


def _experts(text_config) -> int | None:
    """Routed experts of a layer."""
    return getattr(text_config, "num_experts", None) or getattr(text_config, "n_routed_experts", None)


def _check_numerics(contract: ExecutionContract, text_config) -> None:
    """Constants that must fit the model."""
    numerics = contract.numerics
    experts = _experts(text_config)
    if experts and experts % numerics.combine_groups:
        raise ContractError(
            f"numerics.combine_groups: expected a divisor of the model's {experts} experts, found {numerics.combine_groups}; rebuild the "
            "contract for this model"
        )
    if "linear_attention" in (getattr(text_config, "layer_types", None) or ()):
        from isoexec.runtimes.vllm.gdn import FORMS

        forms = [name for name, form in FORMS.items() if contract.backend in form.prefill.declaration.implementations]
        if numerics.gdn_form not in forms:
            raise ContractError(
                f"numerics.gdn_form: expected {' or '.join(map(repr, forms))} on {contract.backend}, found {numerics.gdn_form!r}; rebuild "
                "the contract with a form that the op library implements there"
            )


def activate(contract: ExecutionContract, config) -> None:
    """:func:`check`, and :func:`isoexec.runtimes.activation.activate`."""
    check(contract, config)
    activation.activate(contract, "engine")


def check_request(params) -> None:
    """Refuse a request whose logprobs the trainer could not reproduce; the engine lives on.

    Temperature 0 (greedy) is allowed without logprobs: a greedy token is not drawn from a distribution. vLLM raises a temperature
    in (0, 0.01) to 0.01 before this is called.

    Args:
        params: vLLM ``SamplingParams``.

    Raises:
        ContractError: names the parameter, what was expected, what was found and what to do.
    """
    if type(params).__name__ != "SamplingParams":
        raise ContractError(f"request: expected SamplingParams, found {type(params).__name__}; only generation has logprobs")
    check_settings(REQUEST, params)
    greedy = params.temperature == 0
    if greedy and (params.logprobs is not None or params.logprob_token_ids):
        raise ContractError(
            f"temperature: expected more than 0 where logprobs are asked for, found {params.temperature}: {_DISTRIBUTION}; "
            "raise it, or drop logprobs"
        )
    if not greedy and params.seed is None:
        raise ContractError(
            "seed: expected an integer, found None: what is sampled would depend on the batch; pass one seed per sample"
        )
    if params.prompt_logprobs is not None and params.temperature != 1.0:
        raise ContractError(
            f"prompt_logprobs: expected None at temperature {params.temperature}, found {params.prompt_logprobs}: vLLM takes prompt "
            "logprobs at temperature 1; set temperature=1.0, or drop prompt_logprobs"
        )
