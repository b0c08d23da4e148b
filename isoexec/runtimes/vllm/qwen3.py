"""Qwen3 dense in vLLM: its modules hold the parameters, isoexec.models.qwen3 computes."""

from __future__ import annotations

from isoexec.models import qwen3
from isoexec.ops import rope
from isoexec.runtimes.vllm import layers


def forward(model, contract, input_ids, positions, inputs_embeds=None):
    """Forward pass of vLLM's ``Qwen3Model`` under a contract.

    Args:
        model: vLLM ``Qwen3Model`` (its modules are used for their parameters only).
        contract: the contract that the model was built under.
        input_ids: [T] token ids, or None with ``inputs_embeds`` [T, D] bf16.
        positions: [T] int64, absolute.

    Returns:
        [T, D] bf16, normed.
    """

    tp = layers.tensor_parallel()

    def table():
        return rope.rope_table(positions, model.layers[0].self_attn.head_dim, model.config.rope_parameters["rope_theta"])

    def decoder_layer(layer, x_TD, residual_TD, table):
        attend = layers.attend(layer.self_attn.attn)
        return qwen3.decoder_layer(x_TD, residual_TD, parameters(layer), table, attend, contract.numerics, tp)

    return layers.forward(model, input_ids, inputs_embeds, table, decoder_layer, qwen3.final_norm)


def parameters(layer) -> qwen3.Qwen3Layer:
    """Parameters of a dense layer; read at every pass."""
    attention, mlp = layer.self_attn, layer.mlp
    return qwen3.Qwen3Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=attention.qkv_proj.weight,
        split_qkv=layers.split_qkv(attention.num_heads, attention.num_kv_heads, attention.head_dim),
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        o=attention.o_proj.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        gate_up=mlp.gate_up_proj.weight,
        down=mlp.down_proj.weight,
        eps=layer.input_layernorm.variance_epsilon,
    )
