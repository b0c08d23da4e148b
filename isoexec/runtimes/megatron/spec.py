"""The decoder under a contract: Megatron modules hold the parameters, :mod:`isoexec.models` computes."""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank

from isoexec.contract import ExecutionContract
from isoexec.runtimes.megatron import glm4_moe_lite, modules, qwen3, qwen3_5

#: HF architecture -> (specs of all layers from contract and configuration, final norm).
_DECODERS: dict[str, tuple[Callable, type]] = {
    "Qwen3ForCausalLM": (qwen3.dense_layers, modules.RMSNorm),
    "Qwen3MoeForCausalLM": (qwen3.sparse_layers, modules.RMSNorm),
    "Qwen3_5ForCausalLM": (qwen3_5.dense_layers, modules.ZeroCenteredRMSNorm),
    "Qwen3_5ForConditionalGeneration": (qwen3_5.dense_layers, modules.ZeroCenteredRMSNorm),
    "Qwen3_5MoeForCausalLM": (qwen3_5.sparse_layers, modules.ZeroCenteredRMSNorm),
    "Qwen3_5MoeForConditionalGeneration": (qwen3_5.sparse_layers, modules.ZeroCenteredRMSNorm),
    "Glm4MoeLiteForCausalLM": (glm4_moe_lite.decoder_layers, modules.RMSNorm),
}


def decoder_spec(contract: ExecutionContract, config, vp_stage, pg_collection) -> TransformerBlockSubmodules:
    """Layers of this pipeline stage and the final norm."""
    layers, final_norm = _DECODERS[contract.architecture]
    stage = get_pg_rank(pg_collection.pp)
    first = get_transformer_layer_offset(config, vp_stage, stage)
    count = get_num_layers_to_build(config, vp_stage, stage)
    return TransformerBlockSubmodules(layer_specs=layers(contract, config)[first : first + count], layer_norm=final_norm)
