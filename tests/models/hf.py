"""HF transformers' modules in fp32 and our parameters made of their weights (bf16 values, so that both hold the same numbers)."""

import torch

from isoexec.models import glm4_moe_lite, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe
from isoexec.ops import gdn, moe, rope

LENGTHS = (37, 20)
CU_SEQLENS = torch.tensor([0, 37, 57], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])
D = 128

_SIZES = {
    "vocab_size": 64, "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "attn_implementation": "sdpa", "use_cache": False,
}  # fmt: skip
_ROPE_35 = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True, "mrope_section": [3, 3, 2]}
_GDN = {
    "head_dim": 64, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "rope_parameters": _ROPE_35, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_GLM = {
    "intermediate_size": 256, "moe_intermediate_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "num_key_value_heads": 4,
    "routed_scaling_factor": 1.8, "n_group": 1, "topk_group": 1, "pad_token_id": 0,
}  # fmt: skip
_MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
GROUPS = moe.combine_groups_for(16)


def qwen3_moe_model():
    """Layer 0 dense (``mlp_only_layers``), layer 1 sparse."""
    from transformers import Qwen3MoeConfig, Qwen3MoeModel

    return _filled(
        Qwen3MoeModel(Qwen3MoeConfig(**_SIZES, **_MOE, head_dim=32, intermediate_size=256, norm_topk_prob=True, mlp_only_layers=[0]))
    )


def qwen3_5_model():
    """Layer 0 Gated DeltaNet, layer 1 full attention."""
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    return _filled(Qwen3_5TextModel(Qwen3_5TextConfig(**_SIZES, **_GDN, intermediate_size=256)))


def qwen3_5_moe_model():
    from transformers import Qwen3_5MoeTextConfig, Qwen3_5MoeTextModel

    return _filled(Qwen3_5MoeTextModel(Qwen3_5MoeTextConfig(**_SIZES, **_GDN, **_MOE, shared_expert_intermediate_size=128)))


def glm4_moe_lite_model(**changes):
    """Layer 0 dense, layer 1 sparse; values narrower than queries and keys."""
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteModel

    config = Glm4MoeLiteConfig(**_SIZES | _GLM | {"rms_norm_eps": 1e-6} | changes)  # HF's latent norms know no other
    return _filled(Glm4MoeLiteModel(config))


@torch.no_grad()
def _filled(model):
    """Random weights of a size that makes every gate and norm matter."""
    g = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=g)
        if "conv1d" in name:
            value = noise / 2
        elif p.dim() > 1:
            value = noise / p.shape[-1] ** 0.5
        elif name.endswith("A_log"):
            value = torch.rand(p.shape, generator=g) * 2 - 1
        else:  # norms (ones, or zeros where they are zero-centred) and dt_bias
            value = p + 0.2 * noise
        p.copy_(value.bfloat16().float())
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.randn(bias.shape, generator=g) / 8)
    return model.float().eval()


def stream():
    """The residual stream of the packed batch, [T, D] bf16."""
    return torch.randn(sum(LENGTHS), D, generator=torch.Generator().manual_seed(11)).bfloat16()


def run_layer(model, index, x_TD):
    """HF's layer in the dtype of its weights, each sequence alone -> [T, D] fp32."""
    out = []
    for x in x_TD.to(model.norm.weight.dtype).split(LENGTHS):
        positions = torch.arange(x.shape[0])[None]
        embeddings = model.rotary_emb(x[None], positions)
        out.append(model.layers[index](x[None], position_embeddings=embeddings, attention_mask=None, position_ids=positions)[0])
    return torch.cat(out).float()


def rope_table(model):
    p, head = model.config.rope_parameters, model.config.head_dim
    return rope.rope_table(POSITIONS, int(head * p.get("partial_rotary_factor", 1.0)), p["rope_theta"])


def bf16(*weights):
    """Rows of HF's weights stacked, as a leaf that takes a gradient."""
    return torch.cat([w.detach() for w in weights]).bfloat16().requires_grad_()


def qwen3_layer(hf):
    """A dense :class:`Qwen3Layer` or, with a sparse MLP, a :class:`Qwen3MoELayer`."""
    a, eps = hf.self_attn, hf.input_layernorm.variance_epsilon

    def split_qkv(y):
        q, k, v = y.split((128, 64, 64), -1)
        return q.unflatten(-1, (4, 32)), k.unflatten(-1, (2, 32)), v.unflatten(-1, (2, 32))

    attention = (
        bf16(hf.input_layernorm.weight), bf16(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight), split_qkv,
        bf16(a.q_norm.weight), bf16(a.k_norm.weight), bf16(a.o_proj.weight), bf16(hf.post_attention_layernorm.weight),
    )  # fmt: skip
    if hasattr(hf.mlp, "experts"):
        return qwen3_moe.Qwen3MoELayer(*attention, sparse_mlp(hf.mlp), eps)
    return qwen3.Qwen3Layer(*attention, bf16(hf.mlp.gate_proj.weight, hf.mlp.up_proj.weight), bf16(hf.mlp.down_proj.weight), eps)


def sparse_mlp(m):
    return qwen3_moe.SparseMLP(bf16(m.gate.weight), bf16(m.experts.gate_up_proj), bf16(m.experts.down_proj), m.gate.top_k, True)


def qwen3_5_layer(hf):
    """:class:`Qwen35Layer`, or with a sparse MLP :class:`Qwen35MoELayer`; the projection weights laid out as vLLM does."""
    eps = hf.input_layernorm.eps
    mixer = gated_attention(hf.self_attn, eps) if hasattr(hf, "self_attn") else gated_delta_net(hf.linear_attn, eps)
    first, second, m = bf16(hf.input_layernorm.weight), bf16(hf.post_attention_layernorm.weight), hf.mlp
    if not hasattr(m, "experts"):
        mlp = qwen3_5.MLP(bf16(m.gate_proj.weight, m.up_proj.weight), bf16(m.down_proj.weight))
        return qwen3_5.Qwen35Layer(first, mixer, second, mlp, eps)
    s = m.shared_expert
    shared = qwen3_5_moe.SharedExpert(
        bf16(s.gate_proj.weight, s.up_proj.weight), bf16(s.down_proj.weight), bf16(m.shared_expert_gate.weight)
    )
    return qwen3_5_moe.Qwen35MoELayer(first, mixer, second, sparse_mlp(m), shared, eps)


def gated_attention(a, eps):
    def split_qkv(y):
        q_gate, k, v = y.split((512, 128, 128), -1)
        q, gate = q_gate.unflatten(-1, (4, 128)).chunk(2, -1)
        return q, gate, k.unflatten(-1, (2, 64)), v.unflatten(-1, (2, 64))

    qkv = bf16(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
    return qwen3_5.GatedAttention(qkv, split_qkv, bf16(a.q_norm.weight), bf16(a.k_norm.weight), bf16(a.o_proj.weight), eps)


def gated_delta_net(m, eps):
    def split(qkvz, ba):
        qkv, z = qkvz.split((256, 128), -1)
        b, a = ba.chunk(2, -1)
        return qkv, z.unflatten(-1, (4, 32)), b, a

    in_proj = bf16(m.in_proj_qkv.weight, m.in_proj_z.weight), bf16(m.in_proj_b.weight, m.in_proj_a.weight)
    fp32 = [w.detach().clone().requires_grad_() for w in (m.A_log, m.dt_bias)]
    conv = bf16(m.conv1d.weight.squeeze(1))
    return qwen3_5.GatedDeltaNet(in_proj, split, conv, *fp32, bf16(m.norm.weight), bf16(m.out_proj.weight), 32, 32, eps)


def trainer_gdn(plan):
    """(convolve, mix) of whole packed sequences."""
    return lambda x, w: gdn.conv1d(x, w, plan)[0], lambda *qkvgb: gdn.cpr_wy(*qkvgb, plan)


def glm4_moe_lite_layer(hf):
    """:class:`Glm4MoeLiteLayer`, dense or sparse."""
    eps, m = hf.input_layernorm.variance_epsilon, hf.mlp
    sparse = hasattr(m, "experts")
    mlp = glm_sparse_mlp(m) if sparse else glm_mlp(m)
    norms = bf16(hf.input_layernorm.weight), bf16(hf.post_attention_layernorm.weight)
    return glm4_moe_lite.Glm4MoeLiteLayer(
        norms[0], latent_attention(hf.self_attn, eps), norms[1], mlp, glm_mlp(m.shared_experts) if sparse else None, eps
    )


def latent_attention(a, eps):
    return glm4_moe_lite.LatentAttention(
        bf16(a.q_a_proj.weight), bf16(a.q_a_layernorm.weight), bf16(a.q_b_proj.weight), bf16(a.kv_a_proj_with_mqa.weight),
        bf16(a.kv_a_layernorm.weight), bf16(a.kv_b_proj.weight), bf16(a.o_proj.weight), a.qk_nope_head_dim, a.qk_rope_head_dim,
        a.v_head_dim, eps,
    )  # fmt: skip


def glm_mlp(m):
    return glm4_moe_lite.MLP(bf16(m.gate_proj.weight, m.up_proj.weight), bf16(m.down_proj.weight))


def glm_sparse_mlp(m):
    return sparse_mlp(m)._replace(
        scoring="sigmoid",
        expert_bias=m.gate.e_score_correction_bias.clone(),
        scale=m.routed_scaling_factor,
        n_group=m.n_group,
        topk_group=m.topk_group,
    )
