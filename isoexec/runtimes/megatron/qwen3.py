"""Layers of Qwen3, dense and MoE."""

from __future__ import annotations

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_moe_layer_pattern

from isoexec.contract import ExecutionContract
from isoexec.models import qwen3, qwen3_moe
from isoexec.runtimes.megatron import layers, moe


class Qwen3TransformerLayer(layers.ContractLayer):
    """:func:`isoexec.models.qwen3.decoder_layer`, or with routed experts :func:`isoexec.models.qwen3_moe.decoder_layer`."""

    def compute(self, x, rope_table, bounds):
        common = dict(
            input_norm=self.input_layernorm(),
            post_attention_norm=self.pre_mlp_layernorm(),
            eps=self.config.layernorm_epsilon,
            **layers.attention_parameters(self.self_attention),
        )
        arguments = rope_table, self.attend(bounds), self.numerics, self.tensor_parallel
        if not self.is_moe_layer:
            layer = qwen3.Qwen3Layer(gate_up=self.mlp.linear_fc1(), down=self.mlp.linear_fc2(), **common)
            return qwen3.decoder_layer(x, None, layer, *arguments)
        layer = qwen3_moe.Qwen3MoELayer(mlp=self.mlp(), **common)
        return qwen3_moe.decoder_layer(x, None, layer, *arguments, ep=self.mlp.expert_parallel, on_route=self.mlp.router.on_route)


def dense_layers(contract: ExecutionContract, config) -> list:
    """Specs of all layers of ``Qwen3ForCausalLM``."""
    return [_layer(contract, layers.dense_mlp())] * config.num_layers


def sparse_layers(contract: ExecutionContract, config) -> list:
    """Specs of all layers of ``Qwen3MoeForCausalLM``, some of which may be dense."""
    dense, sparse = _layer(contract, layers.dense_mlp()), _layer(contract, moe.sparse_mlp())
    return [sparse if is_sparse else dense for is_sparse in get_moe_layer_pattern(config)]


def _layer(contract: ExecutionContract, mlp):
    return layers.layer_spec(Qwen3TransformerLayer, contract, layers.attention_spec(), mlp)
