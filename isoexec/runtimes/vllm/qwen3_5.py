"""Qwen3.5 dense and MoE (text) in vLLM: its modules hold the parameters, isoexec.models.qwen3_5 and qwen3_5_moe compute."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.models import qwen3_5, qwen3_5_moe
from isoexec.ops import rope
from isoexec.runtimes.vllm import gdn, layers


def forward(model, contract, input_ids, positions, inputs_embeds=None):
    """Forward pass of vLLM's ``Qwen3_5Model``, dense or MoE, under a contract.

    Args:
        model: vLLM ``Qwen3_5Model`` (its modules are used for their parameters only).
        contract: the contract that the model was built under.
        input_ids: [T] token ids, or None with ``inputs_embeds`` [T, D] bf16.
        positions: [T] int64, absolute; or [3, T], the three sections of mRoPE, which are equal since only text is served.

    Returns:
        [T, D] bf16, normed.
    """
    config, numerics, tp = model.config, contract.numerics, layers.tensor_parallel()

    def table():
        rope_parameters = config.rope_parameters
        rotary_dim = int(config.head_dim * rope_parameters["partial_rotary_factor"])
        return rope.rope_table(positions[0] if positions.dim() == 2 else positions, rotary_dim, rope_parameters["rope_theta"])

    def decoder_layer(layer, x_TD, residual_TD, table):
        held = parameters(layer, config)
        sparse = isinstance(held, qwen3_5_moe.Qwen35MoELayer)
        run, ranks = (qwen3_5_moe, (tp, layers.expert_parallel())) if sparse else (qwen3_5, (tp,))
        if layer.layer_type == "full_attention":
            return run.attention_layer(x_TD, residual_TD, held, table, layers.attend(layer.self_attn.attn), numerics, *ranks)
        return run.gdn_layer(x_TD, residual_TD, held, *gdn.callbacks(layer.linear_attn, contract), numerics, *ranks)

    return layers.forward(model, input_ids, inputs_embeds, table, decoder_layer, qwen3_5.final_norm)


def parameters(layer, config) -> qwen3_5.Qwen35Layer | qwen3_5_moe.Qwen35MoELayer:
    """Parameters of a layer; read at every pass."""
    attends = layer.layer_type == "full_attention"
    mixer = gated_attention(layer.self_attn) if attends else gated_delta_net(layer.linear_attn)
    first, second, mlp = layer.input_layernorm, layer.post_attention_layernorm.weight, layer.mlp
    if not hasattr(mlp, "experts"):
        dense = qwen3_5.MLP(mlp.gate_up_proj.weight, mlp.down_proj.weight)
        return qwen3_5.Qwen35Layer(first.weight, mixer, second, dense, first.variance_epsilon)
    shared = mlp.shared_expert
    return qwen3_5_moe.Qwen35MoELayer(
        input_norm=first.weight,
        mixer=mixer,
        post_attention_norm=second,
        mlp=layers.sparse_mlp(mlp, config.num_experts_per_tok, True),
        shared=qwen3_5_moe.SharedExpert(shared.gate_up_proj.weight, shared.down_proj.weight, mlp.shared_expert_gate.weight),
        eps=first.variance_epsilon,
    )


def gated_attention(attention) -> qwen3_5.GatedAttention:
    """Of vLLM's ``Qwen3NextAttention``, whose rows of ``qkv_proj`` hold query and gate of each head in turn."""
    heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def split_qkv(qkv):
        q_gate, k, v = qkv.split([2 * heads * size, groups * size, groups * size], dim=-1)
        q, gate = q_gate.unflatten(-1, (heads, 2 * size)).chunk(2, -1)
        return q, gate, k.unflatten(-1, (groups, size)), v.unflatten(-1, (groups, size))

    return qwen3_5.GatedAttention(
        qkv=attention.qkv_proj.weight,
        split_qkv=split_qkv,
        q_norm=attention.q_norm.weight,
        k_norm=attention.k_norm.weight,
        o=attention.o_proj.weight,
        eps=attention.q_norm.variance_epsilon,
    )


def gated_delta_net(layer) -> qwen3_5.GatedDeltaNet:
    """Of vLLM's ``QwenGatedDeltaNetAttention``.

    Raises:
        ContractError: ``A_log`` or ``dt_bias`` is not fp32.
    """
    for name in ("A_log", "dt_bias"):
        if getattr(layer, name).dtype != torch.float32:
            raise ContractError(
                f"op gdn.gating: {layer.prefix}.{name}: expected torch.float32, found {getattr(layer, name).dtype}: a rounded one is "
                "another decay; build the patched vLLM (make build), and sync weights without casting it"
            )
    channels, values, value_dim = (2 * layer.key_dim + layer.value_dim) // layer.tp_size, layer.value_dim // layer.tp_size, layer.head_v_dim

    def split(qkvz, ba):
        qkv, z = qkvz.split([channels, values], dim=-1)
        b, a = ba.chunk(2, -1)
        return qkv, z.unflatten(-1, (-1, value_dim)), b, a

    return qwen3_5.GatedDeltaNet(
        in_proj=(layer.in_proj_qkvz.weight, layer.in_proj_ba.weight),
        split=split,
        conv=layer.conv1d.weight.squeeze(1),
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        norm=layer.norm.weight,
        out_proj=layer.out_proj.weight,
        key_dim=layer.head_k_dim,
        value_dim=value_dim,
        eps=layer.layer_norm_epsilon,
    )
