"""Faults that a trace has to find: what is planted where, and what has to be said about it.

The model is Qwen3.5 MoE with four layers: Gated DeltaNet in 0 to 2, attention in 3, experts and a shared expert in each.
"""

from __future__ import annotations

from planting import (
    Fault,
    any_token,
    attention_builder,
    bf16_decay,
    bf16_table,
    built_with,
    coarse_values,
    computed_with,
    dirty,
    dirty_window,
    experts_of,
    extra_op,
    flipped_ties,
    fused_sequences,
    gdn_builder,
    generated,
    halves,
    in_bf16,
    late_positions,
    library_logprob,
    lost_sign,
    not_a_number,
    other_numerics,
    padded_row,
    reciprocal,
    reversed_taps,
    rounded,
    rounded_combine,
    rounded_logits,
    rounded_silu,
    scaled,
    sees_the_next,
    served_by,
    shifted_rope,
    short_context,
    skipped,
    spoiled_cache,
    spoiled_state,
    stale,
    stray_multiply,
    swapped,
    trainer_layer,
    ulp,
    unrounded_residual,
    without_final_norm,
    without_gate,
    without_shared,
)

EMBEDDING, HEAD = -1, 1 << 20
CHANGED = 17  # of the prompts' token ids, the one whose embedding is moved

#: Ops that a switch is put in front of.
SWITCHED = (
    "activation.sigmoid_gate", "activation.silu_mul", "attention.varlen", "attention.write_cache", "gdn.conv1d", "gdn.conv1d_step",
    "gdn.cpr_wy", "gdn.cpr_wy_decode", "gdn.gating", "gdn.l2norm", "logprob.scale_by_temperature", "logprob.token_logprob",
    "matmul.linear", "matmul.lm_head", "moe.combine", "moe.expert_mlp", "moe.route", "norm.add_zero_centered_rms_norm",
    "norm.gated_rms_norm", "norm.rms_norm", "rope.apply_rope", "rope.rope_table",
)  # fmt: skip

FAULTS = {
    # weights
    "one ulp in a query row": Fault(
        "trainer", "weights", 3, "matmul.linear", ulp(lambda p: p.layers[3].self_attention.linear_qkv.weight), "weight", any_token
    ),
    "one ulp in an embedding": Fault(
        "trainer",
        "weights",
        EMBEDDING,
        "embedding.embedding",
        ulp(lambda p: p.gpt.embedding.word_embeddings.weight, CHANGED),
        "weight",
        lambda sequence, position, prompt, tokens: tokens[position] == CHANGED,
    ),
    "one ulp in a norm": Fault(
        "trainer", "weights", 2, "norm.zero_centered_rms_norm", ulp(lambda p: p.layers[2].input_layernorm.weight), "weight", any_token
    ),
    "one ulp in a router": Fault(
        "trainer", "weights", 1, "moe.router_logits", ulp(lambda p: p.layers[1].mlp.router.weight), "weight", any_token
    ),
    "one ulp in the vocabulary head": Fault(
        "trainer", "weights", HEAD, "matmul.lm_head", ulp(lambda p: p.gpt.output_layer.weight), "weight", any_token
    ),
    "one ulp in a convolution": Fault(
        "engine", "weights", 1, "gdn.conv1d", ulp(lambda p: p.layers[1].linear_attn.conv1d.weight), "weight", any_token
    ),
    "a stale layer": Fault("engine", "weights", 1, "moe.expert_mlp", stale(lambda p: p.layers[1].mlp.experts.w2_weight), "parameter down"),
    "a stale final norm": Fault(
        "engine", "weights", HEAD, "norm.zero_centered_rms_norm", stale(lambda p: p.model.model.norm.weight), "weight", any_token
    ),
    "swapped experts": Fault(
        "trainer", "weights", 0, "moe.expert_mlp", swapped(experts_of(trainer_layer(0)), 2, 5), "parameter down", any_token
    ),
    "swapped gate and up": Fault(
        "trainer", "weights", 0, "matmul.linear", halves(lambda p: p.layers[0].mlp.shared_experts.linear_fc1.weight), "weight"
    ),
    "A_log in bf16": Fault("engine", "weights", 1, "gdn.gating", rounded(lambda p: p.layers[1].linear_attn.A_log), "A_log", any_token),
    "dt_bias in bf16": Fault(
        "engine", "weights", 2, "gdn.gating", rounded(lambda p: p.layers[2].linear_attn.dt_bias), "dt_bias", any_token
    ),
    # position, mask, state
    "a wrong rope position": Fault(
        "engine",
        "state",
        EMBEDDING,
        "rope.rope_table",
        shifted_rope,
        "position 6",
        lambda s, position, prompt, tokens: (s, position) == (0, 5),
    ),
    "a pack whose sequences leak, in attention": Fault(
        "trainer", "state", 3, "attention", fused_sequences(3), "position", lambda s, position, prompt, tokens: position == 0
    ),
    "a pack whose sequences leak, in Gated DeltaNet": Fault(
        "trainer", "state", 0, "gdn.conv1d", fused_sequences(0), "position", lambda s, position, prompt, tokens: position == 0
    ),
    "a late position in Gated DeltaNet": Fault(
        "engine", "state", 0, "gdn.core", built_with(gdn_builder, late_positions), "position", generated
    ),
    "a masked token": Fault("engine", "state", 3, "attention", built_with(attention_builder, short_context), "position", generated),
    "a dirty slot": Fault("engine", "state", 1, "gdn.core", spoiled_state(1, "gdn.gating", dirty), "between two steps", generated),
    "a state in bf16": Fault(
        "engine",
        "state",
        2,
        "gdn.core",
        spoiled_state(2, "gdn.gating", in_bf16),
        "between two steps",
        lambda s, position, prompt, tokens: position >= 80,  # the state is next read whole where a chunk of 16 ends
    ),
    "a dirty window": Fault(
        "engine", "state", 2, "gdn.conv1d", spoiled_state(2, "matmul.linear", dirty_window), "earlier tokens", generated
    ),
    "a cache that changes": Fault("engine", "state", 3, "attention", spoiled_cache, "earlier tokens", generated),
    "a cache in eight bits": Fault("engine", "state", 3, "attention", served_by("attention.write_cache", coarse_values), "earlier tokens"),
    # sampling
    "another temperature": Fault(
        "trainer",
        "sampling",
        HEAD,
        "logprob.scale_by_temperature",
        said="temperature",
        score={"temperature": 1.0},
        token=lambda s, position, prompt, tokens: (s, position) == (0, prompt - 1),
    ),
    "another token": Fault(
        "trainer",
        "sampling",
        EMBEDDING,
        "embedding.embedding",
        said="ids",
        score={"change": (2, 3)},
        token=lambda s, position, prompt, tokens: (s, position) == (2, prompt + 3),
    ),
    # ops
    "other leaves": Fault("trainer", "op", 3, "matmul.row_parallel_linear", other_numerics(3, row_leaves=4), "leaves is 8", any_token),
    "another KV block": Fault("trainer", "op", 3, "attention", other_numerics(3, kv_block=32), "kv_block is 64", any_token),
    "another chunk": Fault("trainer", "op", 0, "gdn.core", other_numerics(0, gdn_chunk=32), "chunk is", any_token),
    "a silu that is rounded": Fault(
        "trainer", "op", 1, "activation.silu_mul", served_by("activation.silu_mul", rounded_silu, 1), token=any_token
    ),
    "an unrounded residual": Fault(
        "trainer",
        "op",
        2,
        "norm.zero_centered_rms_norm",
        served_by("norm.add_zero_centered_rms_norm", unrounded_residual, 2),
        token=any_token,
    ),
    "a rope table in bf16": Fault(
        "trainer",
        "op",
        EMBEDDING,
        "rope.rope_table",
        served_by("rope.rope_table", bf16_table),
        token=lambda s, position, prompt, tokens: (s, position) == (0, 1),
    ),
    "a mask that ends late": Fault("trainer", "op", 3, "attention", served_by("attention.varlen", sees_the_next, 3), token=any_token),
    "another attention scale": Fault(
        "trainer", "op", 3, "attention", served_by("attention.varlen", scaled("scale", 1.01), 3), token=any_token
    ),
    "flipped ties of the router": Fault("engine", "op", 1, "moe.route", served_by("moe.route", flipped_ties, 1), token=any_token),
    "router weights not renormalised": Fault(
        "trainer",
        "op",
        0,
        "moe.route",
        lambda plant, parts: plant.attribute(parts.trainer.config, "moe_router_pre_softmax", True),
        "renormalize",
    ),
    "a combine that rounds": Fault("trainer", "op", 1, "moe.combine", served_by("moe.combine", rounded_combine, 1), token=any_token),
    "logits rounded to bf16": Fault("trainer", "op", HEAD, "matmul.lm_head", served_by("matmul.lm_head", rounded_logits), token=any_token),
    "a product in place of the division": Fault(
        "engine", "op", HEAD, "logprob.scale_by_temperature", served_by("logprob.scale_by_temperature", reciprocal), token=any_token
    ),
    "a library's log-softmax": Fault(
        "trainer", "op", HEAD, "logprob.log_softmax", served_by("logprob.token_logprob", library_logprob), token=any_token
    ),
    "a padded vocabulary row": Fault(
        "trainer", "op", HEAD, "logprob.log_softmax", served_by("logprob.token_logprob", padded_row), token=any_token
    ),
    "a value that is not a number": Fault(
        "trainer", "op", 2, "moe.expert_mlp", served_by("moe.expert_mlp", not_a_number, 2), token=any_token
    ),
    "a decay in bf16": Fault("engine", "op", 1, "gdn.core", served_by("gdn.cpr_wy_decode", bf16_decay, 1), token=generated),
    "a sign that is lost": Fault("trainer", "op", 0, "norm.gated_rms_norm", served_by("norm.gated_rms_norm", lost_sign, 0)),
    "taps in another order": Fault("trainer", "op", 0, "gdn.conv1d", served_by("gdn.conv1d", reversed_taps, 0)),
    "another theta": Fault(
        "engine",
        "op",
        EMBEDDING,
        "rope.rope_table",
        lambda plant, parts: plant.attribute(
            parts.model.model.config, "rope_parameters", parts.model.model.config.rope_parameters | {"rope_theta": 1e6}
        ),
        "theta is",
        lambda s, position, prompt, tokens: (s, position) == (0, 1),
    ),
    # structure
    "no final norm": Fault("trainer", "structure", HEAD, "norm.zero_centered_rms_norm", without_final_norm, "the engine runs more"),
    "an extra op": Fault("trainer", "structure", 1, "activation.sigmoid_gate", computed_with(1, extra_op), "the trainer runs more"),
    "a stray multiplication": Fault("trainer", "structure", 1, "norm.zero_centered_rms_norm", computed_with(1, stray_multiply), "outside"),
    "a skipped layer": Fault("trainer", "structure", 2, "", skipped(2), "layer 2"),
    "no shared expert": Fault("trainer", "structure", 0, "matmul.linear", without_shared, "the engine runs more"),
    "no output gate": Fault("engine", "structure", 3, "", without_gate, "the trainer runs more"),
}
