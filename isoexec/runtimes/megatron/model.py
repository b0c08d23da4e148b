"""From an HF checkpoint to a Megatron ``GPTModel`` under DDP with a distributed optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from isoexec.contract import ContractError
from isoexec.runtimes.megatron import checkpoint


def transformer_config(hf_config, groups, *, sequence_parallel: bool = False, **overrides) -> TransformerConfig:
    """Megatron's configuration of an HF Qwen3 model, bf16.

    Args:
        hf_config: transformers config.
        groups: Megatron ``ProcessGroupCollection`` (degrees are read from it).
        sequence_parallel: shard activations between blocks by tokens.
        overrides: ``TransformerConfig`` fields, e.g. recompute settings.
    """
    fields = dict(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=hf_config.head_dim,
        ffn_hidden_size=hf_config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
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
        sequence_parallel=sequence_parallel,
        finalize_model_grads_func=finalize_model_grads,
    )
    return TransformerConfig(**{**fields, **overrides})


def build_model(hf_config, config: TransformerConfig, groups, device) -> torch.nn.Module:
    """``Float16Module(GPTModel)`` of this pipeline stage, on ``device``; parameters are not set yet.

    Under a contract the patched ``GPTModel`` replaces the local layer spec given here.
    """
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=_padded_vocabulary(hf_config.vocab_size, groups.tp.size()),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        position_embedding_type="rope",
        rotary_base=rope_theta(hf_config),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        pg_collection=groups,
    )
    return Float16Module(config, model).to(device)


def load(model: GPTModel, hf_config, folder, groups) -> None:
    """Fill this rank's parameters from an HF folder."""
    checkpoint.load_hf(
        model, hf_config, folder, layer_offset=layer_offset(model, groups), rank=groups.tp.rank(), ranks=groups.tp.size()
    )


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


def rope_theta(hf_config) -> float:
    """Base of the rotary embedding.

    Raises:
        ContractError: the checkpoint scales its positions.
    """
    parameters = hf_config.rope_parameters
    if parameters.get("rope_type", "default") != "default":
        raise ContractError(f"rope_parameters.rope_type: expected 'default', found {parameters['rope_type']!r}; scaled rope is not covered")
    return parameters["rope_theta"]


def _padded_vocabulary(size: int, ranks: int) -> int:
    """Vocabulary rows of the model: whole 64-entry blocks on every rank, as the sharded log-softmax needs."""
    return size if ranks == 1 else -(-size // (64 * ranks)) * 64 * ranks
