"""The native arm's decoder: upstream's local layers, for which upstream has no ready spec where mixers alternate."""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs, get_gpt_layer_local_spec
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


class OutputNorm:
    """Gated DeltaNet's norm, which is not zero-centred where the model's others are."""

    def __new__(cls, config, hidden_size: int, eps: float):
        return torch.nn.RMSNorm(hidden_size, eps=eps)


class LatentCoreAttention:
    """The local attention kernel inside latent attention, which tells its kernel two sizes that only Transformer Engine's takes."""

    def __new__(cls, *, k_channels: int | None = None, v_channels: int | None = None, **kwargs):
        return DotProductAttention(**kwargs)


def decoder_spec(config, pipeline_rank: int) -> ModuleSpec | TransformerBlockSubmodules:
    """Spec of this pipeline stage's layers.

    Args:
        config: Megatron ``TransformerConfig``.
        pipeline_rank: index of the stage.
    """
    if config.num_moe_experts is None and config.experimental_attention_variant is None:
        return get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layers = get_gpt_decoder_layer_specs(config, use_transformer_engine=False, normalization="RMSNorm")
    if config.experimental_attention_variant is not None:
        linear = get_linear_attention_pattern(config)
        layers = [_with_gated_delta_net(layer) if is_linear else layer for layer, is_linear in zip(layers, linear, strict=True)]
    if config.multi_latent_attention:
        layers = [_with_local_kernel(layer) for layer in layers]
    first = get_transformer_layer_offset(config, None, pipeline_rank)
    stage = layers[first : first + get_num_layers_to_build(config, None, pipeline_rank)]
    return TransformerBlockSubmodules(layer_specs=stage, layer_norm=LocalSpecProvider().layer_norm(rms_norm=True))


def _with_gated_delta_net(layer: ModuleSpec) -> ModuleSpec:
    backend = LocalSpecProvider()
    mixer = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(), out_norm=OutputNorm, out_proj=backend.row_parallel_linear()
        ),
    )
    names = layer.submodules.sharded_state_dict_keys_map | {"input_layernorm.": "self_attention.in_proj.layer_norm_"}
    submodules = dataclasses.replace(layer.submodules, self_attention=mixer, sharded_state_dict_keys_map=names)
    return dataclasses.replace(layer, submodules=submodules)


def _with_local_kernel(layer: ModuleSpec) -> ModuleSpec:
    mixer = layer.submodules.self_attention
    mixer = dataclasses.replace(mixer, submodules=dataclasses.replace(mixer.submodules, core_attention=LatentCoreAttention))
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=mixer))
