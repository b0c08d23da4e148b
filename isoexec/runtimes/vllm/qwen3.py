"""Qwen3 dense in vLLM: its modules hold the parameters, isoexec.models.qwen3 computes."""

from __future__ import annotations

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output

from isoexec.models import qwen3
from isoexec.ops import rope
from isoexec.ops._core import registry
from isoexec.runtimes.vllm import step


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
    with registry.executing(step.begin(_max_query_len())):
        x_TD = model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        first = model.layers[0].self_attn
        rope_table = rope.rope_table(positions, first.head_dim, model.config.rope_parameters["rope_theta"])
        residual_TD = None
        for layer in model.layers:
            x_TD, residual_TD = qwen3.decoder_layer(
                x_TD, residual_TD, _parameters(layer), rope_table, _attend(layer.self_attn.attn), contract.numerics
            )
        return qwen3.final_norm(x_TD, residual_TD, model.norm.weight, model.norm.variance_epsilon)


def _max_query_len() -> int | None:
    metadata = get_forward_context().attn_metadata
    return None if metadata is None else next(iter(metadata.values())).max_query_len


def _parameters(layer) -> qwen3.Qwen3Layer:
    """Read at every pass: a weight sync may replace a module's parameter."""
    attention, mlp = layer.self_attn, layer.mlp
    heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def split_qkv(qkv):
        q, k, v = qkv.split([heads * size, groups * size, groups * size], dim=-1)
        return q.unflatten(-1, (heads, size)), k.unflatten(-1, (groups, size)), v.unflatten(-1, (groups, size))

    return qwen3.Qwen3Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=attention.qkv_proj.weight,
        split_qkv=split_qkv,
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        o=attention.o_proj.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        gate_up=mlp.gate_up_proj.weight,
        down=mlp.down_proj.weight,
        eps=layer.input_layernorm.variance_epsilon,
    )


def _attend(layer):
    """vLLM's attention layer as the function that the model wants.

    The Python function behind vLLM's custom op is called directly: a dispatch mode (the audit) sees through it.
    """

    def attend(q_THK, k_TGK, v_TGK):
        output_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
        unified_attention_with_output(q_THK, k_TGK, v_TGK, output_THK, layer.layer_name)
        return output_THK

    return attend
