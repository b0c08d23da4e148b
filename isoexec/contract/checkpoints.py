"""Which checkpoints the model functions cover: entries of an HF text config, by architecture."""

from __future__ import annotations

from isoexec.contract.settings import UNPROVEN, UNROUTED, Setting, check_settings

_COMMON = (
    Setting("quantization_config", (None,), "matrix products would be quantised"),
    Setting("hidden_act", ("silu", None), UNROUTED),
    Setting("attention_bias", (None, False), "the model function has no bias"),
    Setting("is_causal", (None, True), "attention is causal in the trainer"),
    Setting("use_sliding_window", (None, False), UNPROVEN),
    Setting("dual_chunk_attention_config", (None,), UNROUTED),
    Setting("rope_parameters.rope_type", (None, "default"), "the rope table is computed from positions and theta alone"),
    # Older files say the same in another place, or by another name.
    Setting("rope_scaling.rope_type", (None, "default"), "the rope table is computed from positions and theta alone"),
    Setting("rope_scaling.type", (None, "default", "mrope"), "the rope table is computed from positions and theta alone"),
)
_QWEN3 = (*_COMMON, Setting("rope_parameters.partial_rotary_factor", (None, 1.0), "Qwen3 rotates whole heads"))
_QWEN3_5 = (
    *_COMMON,
    Setting("qkv_bias", (None, False), "the model function has no bias"),
    Setting("attn_output_gate", (None, True), "the model function has the gate"),
    Setting("output_gate_type", (None, "silu", "swish"), "the output norm's gate is silu"),
    Setting("layer_scale", (None, False), "the model function has no layer scale"),
)
_RENORMALISED = Setting("norm_topk_prob", (None, True), "the trainer's router always renormalises")
_QWEN3_5_MOE = (*_QWEN3_5, _RENORMALISED)
_GLM4_MOE_LITE = (
    *_COMMON,
    _RENORMALISED,
    Setting("rope_parameters.partial_rotary_factor", (None, 1.0), "the rotary channels of a head all rotate"),
    Setting("rope_interleave", (None, True), "the model function turns neighbouring channels"),
    Setting("moe_layer_freq", (None, 1), "every layer after the dense ones is sparse in the trainer"),
)

#: HF architecture -> paths into the model's HF text config.
COVERED: dict[str, tuple[Setting, ...]] = {
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _QWEN3,
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_MOE,
    "Glm4MoeLiteForCausalLM": _GLM4_MOE_LITE,
}


def check_checkpoint(architecture: str, text_config, where: str = "") -> None:
    """Refuse a checkpoint whose function is not the one that both runtimes compute; an architecture outside the table is not judged.

    Args:
        architecture: HF architecture.
        text_config: HF text config, as an object or as the mapping that its file holds.
        where: see :func:`check_settings`.

    Raises:
        ContractError: see :func:`check_settings`.
    """
    advice = "this checkpoint computes another function than the one that is proven; unset ISOEXEC_CONTRACT to run upstream's kernels"
    check_settings(COVERED.get(architecture, ()), text_config, where, advice)
