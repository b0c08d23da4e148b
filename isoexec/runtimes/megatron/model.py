"""From an HF checkpoint to a Megatron ``GPTModel`` under DDP with a distributed optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from isoexec.contract import ContractError
from isoexec.contract.manifest import Manifest
from isoexec.ops._core.digest import PendingDigests
from isoexec.runtimes.megatron import checkpoint, native
from isoexec.runtimes.megatron.checkpoint import manifest_of_ranks
from isoexec.runtimes.megatron.exchange import CPU, share_tensors
from isoexec.runtimes.megatron.mapping import architecture_of, experts_of, linear_layers, sparse_layers


def transformer_config(hf_config, groups, *, sequence_parallel: bool = False, aux_loss: float = 0.0, **overrides) -> TransformerConfig:
    """Megatron's configuration of an HF model, bf16.

    Args:
        hf_config: transformers config.
        groups: Megatron ``ProcessGroupCollection`` (degrees are read from it).
        sequence_parallel: shard activations between blocks by tokens.
        aux_loss: coefficient of the router's load-balancing loss.
        overrides: ``TransformerConfig`` fields, e.g. recompute settings.
    """
    architecture_of(hf_config)
    text = hf_config.get_text_config()
    fields = dict(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        ffn_hidden_size=getattr(text, "intermediate_size", None) or text.moe_intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        attention_softmax_in_fp32=True,
        transformer_impl="local",
        # Fused kernels that upstream has for CUDA alone, and that no layer of ours calls.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,  # every parameter comes from the checkpoint
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default one refuses variable lengths, also without experts
        batch_p2p_comm=False,
        tensor_model_parallel_size=groups.tp.size(),
        pipeline_model_parallel_size=groups.pp.size(),
        expert_model_parallel_size=groups.ep.size(),
        expert_tensor_parallel_size=1,
        sequence_parallel=sequence_parallel,
        finalize_model_grads_func=finalize_model_grads,
    )
    if any(sparse_layers(text)):
        fields |= _expert_fields(text, aux_loss)
    if any(linear_layers(text)):
        fields |= _hybrid_fields(text)
    latent = getattr(text, "kv_lora_rank", None) is not None
    if latent:
        fields |= _latent_fields(text)
    return (MLATransformerConfig if latent else TransformerConfig)(**{**fields, **overrides})


def _expert_fields(text, aux_loss: float) -> dict:
    gated = getattr(text, "shared_expert_intermediate_size", None)
    shared = gated or (getattr(text, "n_shared_experts", None) or 0) * text.moe_intermediate_size or None
    router = _sigmoid_router(text) if hasattr(text, "routed_scaling_factor") else {}
    return dict(
        num_moe_experts=experts_of(text),
        moe_layer_freq=[int(sparse) for sparse in sparse_layers(text)],
        moe_ffn_hidden_size=text.moe_intermediate_size,
        moe_router_topk=text.num_experts_per_tok,
        # Softmax over the chosen logits alone is the renormalised softmax over all. Qwen3.5's router knows no other.
        moe_router_pre_softmax=not getattr(text, "norm_topk_prob", True),
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if aux_loss else "none",
        moe_aux_loss_coeff=aux_loss,
        moe_shared_expert_intermediate_size=shared,
        moe_shared_expert_gate=gated is not None,
        **router,
    )


def _sigmoid_router(text) -> dict:
    if not text.norm_topk_prob:
        raise ContractError("norm_topk_prob: expected true, found false: Megatron's sigmoid router renormalises; use another checkpoint")
    grouped = text.n_group > 1
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=text.routed_scaling_factor,
        moe_router_num_groups=text.n_group if grouped else None,
        moe_router_group_topk=text.topk_group if grouped else None,
    )


def _latent_fields(text) -> dict:
    if text.q_lora_rank is None or text.attention_bias or not text.rope_interleave:
        raise ContractError(
            f"latent attention: expected a q_lora_rank, no attention_bias and rope_interleave, found {text.q_lora_rank}, "
            f"{text.attention_bias} and {text.rope_interleave}; the model function covers no other"
        )
    return dict(
        multi_latent_attention=True,
        q_lora_rank=text.q_lora_rank,
        kv_lora_rank=text.kv_lora_rank,
        qk_head_dim=text.qk_nope_head_dim,
        qk_pos_emb_head_dim=text.qk_rope_head_dim,
        v_head_dim=text.v_head_dim,
        kv_channels=text.v_head_dim,  # by which upstream's local attention sizes its output
        rope_type="rope",
        rotary_base=rope_theta(text),
    )


def _hybrid_fields(text) -> dict:
    return dict(
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(linear) for linear in linear_layers(text)],
        linear_conv_kernel_dim=text.linear_conv_kernel_dim,
        linear_key_head_dim=text.linear_key_head_dim,
        linear_value_head_dim=text.linear_value_head_dim,
        linear_num_key_heads=text.linear_num_key_heads,
        linear_num_value_heads=text.linear_num_value_heads,
        deterministic_mode=True,  # upstream's Gated DeltaNet in torch instead of Triton; no layer of ours reads it
    )


class PaddedGPTModel(GPTModel):
    """Takes right-padded rows. Attention is causal, so a row's padding reaches none of its tokens and a padding mask says nothing.

    Upstream's local attention would read a given mask as the whole mask, and let tokens see later ones.
    """

    def forward(self, input_ids, position_ids, attention_mask, *args, **kwargs):
        return super().forward(input_ids, position_ids, None, *args, **kwargs)


def build_model(hf_config, config: TransformerConfig, groups, device, *, padded: bool = False) -> torch.nn.Module:
    """``Float16Module(GPTModel)`` of this pipeline stage, on ``device``; parameters are not set yet.

    Under a contract the patched ``GPTModel`` replaces the spec of upstream's local layers given here.

    Args:
        padded: build a :class:`PaddedGPTModel`.
    """
    text = hf_config.get_text_config()
    model = (PaddedGPTModel if padded else GPTModel)(
        config=config,
        transformer_layer_spec=native.decoder_spec(config, groups.pp.rank()),
        vocab_size=_padded_vocabulary(text.vocab_size, groups.tp.size()),
        max_sequence_length=text.max_position_embeddings,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        position_embedding_type="rope",
        rotary_base=rope_theta(text),
        rotary_percent=text.rope_parameters.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=text.tie_word_embeddings,
        pg_collection=groups,
    )
    float16 = Float16Module(config, model).to(device)
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):  # upstream does so at the first forward pass; a checkpoint comes before
            module._maintain_float32_expert_bias()
    return float16


def load(model: GPTModel, hf_config, folder, groups) -> None:
    """Fill this rank's parameters from an HF folder."""
    checkpoint.load_hf(
        model,
        hf_config,
        folder,
        layer_offset=layer_offset(model, groups),
        rank=groups.tp.rank(),
        ranks=groups.tp.size(),
        expert_rank=groups.ep.rank(),
        expert_ranks=groups.ep.size(),
    )


def hf_tensors(model: GPTModel, hf_config, groups, read=torch.Tensor.detach, device=CPU) -> dict[str, torch.Tensor]:
    """Whole HF tensors of the policy, of every stage and rank; every rank calls.

    Args:
        read: what to take of a parameter: its value, or for example its gradient.
        device: where they are wanted: on the CPU as copies, or where the model is, read before it changes.
    """
    stage = checkpoint.hf_tensors(
        model, hf_config, layer_offset=layer_offset(model, groups), group=groups.tp, expert_group=groups.ep, read=read, device=device
    )
    return share_tensors(stage, groups.pp, device)


def begin_weight_digests(model: GPTModel, hf_config, groups) -> PendingDigests:
    """The device's part of :func:`weight_manifest`, launched; every rank calls, and makes a manifest of it by ``manifest_of_ranks``.

    Raises:
        ContractError: a parameter or buffer has no HF name.
    """
    return checkpoint.begin_hf_digests(
        model, hf_config, layer_offset=layer_offset(model, groups), group=groups.tp, expert_group=groups.ep
    )


def weight_manifest(model: GPTModel, hf_config, groups) -> Manifest:
    """Digest of every logical tensor of the policy, the same whatever the layout; every rank calls, each gets it.

    Raises:
        ContractError: a parameter or buffer has no HF name, or ranks that hold the same tensor have other bits in it.
    """
    return manifest_of_ranks(begin_weight_digests(model, hf_config, groups))


def layer_offset(model: GPTModel, groups) -> int:
    """Global index of this stage's first layer."""
    return get_transformer_layer_offset(model.config, None, groups.pp.rank())


def wrap(model: torch.nn.Module, config: TransformerConfig, groups, lr: float):
    """DDP with fp32 gradient reduction, and Adam on sharded fp32 master weights.

    Returns:
        (ddp model, optimizer).
    """
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=lr,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
        ),
        [ddp],
    )
    return ddp, optimizer


def gather_gradients(ddp: DistributedDataParallel) -> None:
    """Make every ``main_grad`` whole; every rank calls.

    A distributed optimizer reduces and clips on each data-parallel rank the shard that it updates, and leaves the rest as the rank's own
    sum. Where expert parallelism does not share them out, experts have the tensor-parallel ranks among their data-parallel ones.
    """
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets if group.size() > 1 else ():
            shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def rope_theta(text) -> float:
    """Base of the rotary embedding.

    Raises:
        ContractError: the checkpoint scales its positions.
    """
    parameters = text.rope_parameters
    if parameters.get("rope_type", "default") != "default":
        raise ContractError(f"rope_parameters.rope_type: expected 'default', found {parameters['rope_type']!r}; scaled rope is not covered")
    return parameters["rope_theta"]


def _padded_vocabulary(size: int, ranks: int) -> int:
    """Vocabulary rows of the model: whole 64-entry blocks on every rank, as the sharded log-softmax needs."""
    return size if ranks == 1 else -(-size // (64 * ranks)) * 64 * ranks
