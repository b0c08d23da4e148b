"""Layers of Qwen3.5, dense and MoE: Gated DeltaNet or gated attention."""

from __future__ import annotations

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern, get_moe_layer_pattern

from isoexec.contract import ExecutionContract
from isoexec.models import qwen3_5, qwen3_5_moe
from isoexec.runtimes.megatron import gdn, layers, moe


class Qwen35TransformerLayer(layers.ContractLayer):
    """A layer function of :mod:`isoexec.models.qwen3_5`, or with routed experts of :mod:`isoexec.models.qwen3_5_moe`."""

    def compute(self, x, rope_table, bounds):
        family = qwen3_5_moe if self.is_moe_layer else qwen3_5
        eps = self.config.layernorm_epsilon
        if isinstance(self.self_attention, gdn.GatedDeltaNetWeights):
            function, mixer = family.gdn_layer, self.self_attention()
            where = gdn.callbacks(bounds.on_host, self.numerics, x.device)
        else:
            function, where = family.attention_layer, (rope_table, self.attend(bounds))
            mixer = qwen3_5.GatedAttention(eps=eps, **layers.attention_parameters(self.self_attention))
        common = dict(input_norm=self.input_layernorm(), mixer=mixer, post_attention_norm=self.pre_mlp_layernorm(), eps=eps)
        if not self.is_moe_layer:
            layer = qwen3_5.Qwen35Layer(mlp=qwen3_5.MLP(self.mlp.linear_fc1(), self.mlp.linear_fc2()), **common)
            return function(x, None, layer, *where, self.numerics, self.tensor_parallel)
        layer = qwen3_5_moe.Qwen35MoELayer(mlp=self.mlp(), shared=self.mlp.shared_experts(), **common)
        experts = dict(ep=self.mlp.expert_parallel, on_route=self.mlp.router.on_route)
        return function(x, None, layer, *where, self.numerics, self.tensor_parallel, **experts)


def dense_layers(contract: ExecutionContract, config) -> list:
    """Specs of all layers of ``Qwen3_5ForCausalLM``."""
    return _layers(contract, config, [0] * config.num_layers)


def sparse_layers(contract: ExecutionContract, config) -> list:
    """Specs of all layers of ``Qwen3_5MoeForCausalLM``."""
    return _layers(contract, config, get_moe_layer_pattern(config))


def _layers(contract: ExecutionContract, config, sparse: list[int]) -> list:
    mixers = {1: (gdn.gated_delta_net_spec(), "in_proj"), 0: (layers.attention_spec(), "linear_qkv")}
    mlps = {1: moe.sparse_mlp(moe.SharedExpertWeights), 0: layers.dense_mlp()}

    def layer(linear: int, is_sparse: int):
        mixer, mixer_input = mixers[linear]
        return layers.layer_spec(Qwen35TransformerLayer, contract, mixer, mlps[is_sparse], mixer_input)

    return [layer(*kinds) for kinds in zip(get_linear_attention_pattern(config), sparse, strict=True)]
