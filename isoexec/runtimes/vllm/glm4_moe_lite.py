"""GLM-4.7-Flash in vLLM: its modules hold the parameters, isoexec.models.glm4_moe_lite computes.

The model is built with ``DeepseekV2Attention``, whose cache holds keys and values of each head; values narrower than queries are padded.
"""

from __future__ import annotations

from isoexec.models import glm4_moe_lite
from isoexec.ops import rope
from isoexec.runtimes.vllm import layers


def forward(model, contract, input_ids, positions, inputs_embeds=None):
    """Forward pass of vLLM's ``Glm4MoeLiteModel`` under a contract; arguments and result as :func:`isoexec.runtimes.vllm.qwen3.forward`."""
    config, tp, ep = model.config, layers.tensor_parallel(), layers.expert_parallel()

    def table():
        return rope.rope_table(positions, config.qk_rope_head_dim, config.rope_parameters["rope_theta"])

    def decoder_layer(layer, x_TD, residual_TD, table):
        attend = layers.attend(layer.self_attn.attn)
        return glm4_moe_lite.decoder_layer(x_TD, residual_TD, parameters(layer, config), table, attend, contract.numerics, tp, ep)

    return layers.forward(model, input_ids, inputs_embeds, table, decoder_layer, glm4_moe_lite.final_norm)


def parameters(layer, config) -> glm4_moe_lite.Glm4MoeLiteLayer:
    """Parameters of a layer; read at every pass."""
    sparse = hasattr(layer.mlp, "experts")
    return glm4_moe_lite.Glm4MoeLiteLayer(
        input_norm=layer.input_layernorm.weight,
        attention=latent_attention(layer.self_attn),
        post_attention_norm=layer.post_attention_layernorm.weight,
        mlp=sparse_mlp(layer.mlp, config) if sparse else mlp(layer.mlp),
        shared=mlp(layer.mlp.shared_experts) if sparse and layer.mlp.shared_experts is not None else None,
        eps=layer.input_layernorm.variance_epsilon,
    )


def latent_attention(attention) -> glm4_moe_lite.LatentAttention:
    return glm4_moe_lite.LatentAttention(
        q_a=attention.q_a_proj.weight,
        q_a_norm=attention.q_a_layernorm.weight,
        q_b=attention.q_b_proj.weight,
        kv_a=attention.kv_a_proj_with_mqa.weight,
        kv_a_norm=attention.kv_a_layernorm.weight,
        kv_b=attention.kv_b_proj.weight,
        o=attention.o_proj.weight,
        nope_dim=attention.qk_nope_head_dim,
        rope_dim=attention.qk_rope_head_dim,
        value_dim=attention.v_head_dim,
        eps=attention.q_a_layernorm.variance_epsilon,
    )


def mlp(module) -> glm4_moe_lite.MLP:
    return glm4_moe_lite.MLP(module.gate_up_proj.weight, module.down_proj.weight)


def sparse_mlp(block, config):
    return layers.sparse_mlp(block, config.num_experts_per_tok, config.norm_topk_prob)._replace(
        scoring="sigmoid",
        expert_bias=block.gate.e_score_correction_bias,
        scale=config.routed_scaling_factor,
        n_group=config.n_group,
        topk_group=config.topk_group,
    )
