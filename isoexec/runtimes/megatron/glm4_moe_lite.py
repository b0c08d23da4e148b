"""Layers of GLM-4.7-Flash: latent attention and sigmoid-routed experts."""

from __future__ import annotations

import functools

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec

from isoexec.contract import ExecutionContract
from isoexec.models import glm4_moe_lite
from isoexec.runtimes.megatron import layers, modules, moe


class LatentAttentionWeights(MegatronModule):
    """The parameters of upstream's ``MLASelfAttention``, under its names.

    A class of its own, since upstream's constructor knows a fixed list of classes for the down-projections. These are whole on every rank:
    their outputs are what the heads of all ranks read.
    """

    def __init__(self, config, layer_number: int, pg_collection, **unused):
        super().__init__(config)
        heads, qk_size = config.num_attention_heads, config.qk_head_dim + config.qk_pos_emb_head_dim
        common = dict(config=config, init_method=config.init_method, bias=False, skip_bias_add=False, tp_group=pg_collection.tp)
        column = functools.partial(modules.ColumnWeight, gather_output=False, **common)
        norm = functools.partial(modules.NormWeight, config=config, eps=config.layernorm_epsilon)
        self.linear_q_down_proj = modules.ReplicatedWeight(config, config.q_lora_rank, config.hidden_size)
        self.linear_q_up_proj = column(config.q_lora_rank, heads * qk_size)
        self.linear_kv_down_proj = modules.ReplicatedWeight(config, config.kv_lora_rank + config.qk_pos_emb_head_dim, config.hidden_size)
        self.linear_kv_up_proj = column(config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim))
        self.linear_proj = modules.RowWeight(heads * config.v_head_dim, config.hidden_size, input_is_parallel=True, **common)
        self.q_layernorm = norm(hidden_size=config.q_lora_rank)
        self.kv_layernorm = norm(hidden_size=config.kv_lora_rank)

    def forward(self) -> glm4_moe_lite.LatentAttention:
        return glm4_moe_lite.LatentAttention(
            q_a=self.linear_q_down_proj(),
            q_a_norm=self.q_layernorm(),
            q_b=self.linear_q_up_proj(),
            kv_a=self.linear_kv_down_proj(),
            kv_a_norm=self.kv_layernorm(),
            kv_b=self.linear_kv_up_proj(),
            o=self.linear_proj(),
            nope_dim=self.config.qk_head_dim,
            rope_dim=self.config.qk_pos_emb_head_dim,
            value_dim=self.config.v_head_dim,
            eps=self.config.layernorm_epsilon,
        )


class Glm4MoeLiteTransformerLayer(layers.ContractLayer):
    """:func:`isoexec.models.glm4_moe_lite.decoder_layer`."""

    def compute(self, x, rope_table, bounds):
        sparse = self.is_moe_layer
        layer = glm4_moe_lite.Glm4MoeLiteLayer(
            input_norm=self.input_layernorm(),
            attention=self.self_attention(),
            post_attention_norm=self.pre_mlp_layernorm(),
            mlp=self.mlp() if sparse else glm4_moe_lite.MLP(self.mlp.linear_fc1(), self.mlp.linear_fc2()),
            shared=self.mlp.shared_experts() if sparse and self.mlp.use_shared_expert else None,
            eps=self.config.layernorm_epsilon,
        )
        routed = dict(ep=self.mlp.expert_parallel, on_route=self.mlp.router.on_route) if sparse else {}
        return glm4_moe_lite.decoder_layer(
            x, None, layer, rope_table, self.attend(bounds), self.numerics, self.tensor_parallel, **routed
        )

    @property
    def head_size(self):
        return self.config.qk_head_dim + self.config.qk_pos_emb_head_dim


def decoder_layers(contract: ExecutionContract, config) -> list:
    """Specs of all layers: the first are dense."""
    dense, sparse = _layer(contract, layers.dense_mlp()), _layer(contract, moe.sparse_mlp(moe.UngatedSharedExpertWeights))
    return [sparse if is_sparse else dense for is_sparse in get_moe_layer_pattern(config)]


def _layer(contract: ExecutionContract, mlp) -> ModuleSpec:
    # Upstream's layers of latent attention keep their norms' own names in distributed checkpoints.
    return layers.layer_spec(Glm4MoeLiteTransformerLayer, contract, ModuleSpec(module=LatentAttentionWeights), mlp, mixer_input=None)
