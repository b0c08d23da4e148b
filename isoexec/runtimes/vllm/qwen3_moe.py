"""Qwen3 MoE in vLLM: its modules hold the parameters, isoexec.models.qwen3_moe computes."""

from __future__ import annotations

from isoexec.models import qwen3, qwen3_moe
from isoexec.ops import rope
from isoexec.runtimes.vllm import layers
from isoexec.runtimes.vllm.qwen3 import parameters as dense_parameters


def forward(model, contract, input_ids, positions, inputs_embeds=None):
    """Forward pass of vLLM's ``Qwen3MoeModel`` under a contract; arguments and result as :func:`isoexec.runtimes.vllm.qwen3.forward`."""
    config, numerics = model.config, contract.numerics
    tp, ep = layers.tensor_parallel(), layers.expert_parallel()

    def table():
        return rope.rope_table(positions, model.layers[0].self_attn.head_dim, config.rope_parameters["rope_theta"])

    def decoder_layer(layer, x_TD, residual_TD, table):
        attend = layers.attend(layer.self_attn.attn)
        if hasattr(layer.mlp, "experts"):
            held = parameters(layer, config.num_experts_per_tok, config.norm_topk_prob)
            return qwen3_moe.decoder_layer(x_TD, residual_TD, held, table, attend, numerics, tp, ep)
        return qwen3.decoder_layer(x_TD, residual_TD, dense_parameters(layer), table, attend, numerics, tp)

    return layers.forward(model, input_ids, inputs_embeds, table, decoder_layer, qwen3.final_norm)


def parameters(layer, top_k: int, renormalize: bool) -> qwen3_moe.Qwen3MoELayer:
    """Parameters of a sparse layer; read at every pass."""
    attention = layer.self_attn
    return qwen3_moe.Qwen3MoELayer(
        input_norm=layer.input_layernorm.weight,
        qkv=attention.qkv_proj.weight,
        split_qkv=layers.split_qkv(attention.num_heads, attention.num_kv_heads, attention.head_dim),
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        o=attention.o_proj.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        mlp=layers.sparse_mlp(layer.mlp, top_k, renormalize),
        eps=layer.input_layernorm.variance_epsilon,
    )
