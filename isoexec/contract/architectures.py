"""What the logprob path of each architecture consists of: regions of ops by case, dtypes, and the states that outlive a step.

Names only: which code serves an op is the composition's matter, and the op library's.
"""

from __future__ import annotations

from typing import NamedTuple

#: Every place where a policy's logprob is computed.
CASES = ("trainer_forward", "trainer_recompute", "trainer_score", "engine_prefill", "engine_decode")
TRAINER, ENGINE = CASES[:3], CASES[3:]


class Region(NamedTuple):
    """Ops that one implementation serves together.

    Attributes:
        name: of the region.
        trainer, prefill, decode: ops that each execution of such a case calls; () where the region does not take part.
        optional: ops that depend on the layout, or on what is asked for.
        recomputed: whether activation recomputation, which covers the layers, runs it.
    """

    name: str
    trainer: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    optional: tuple[str, ...] = ()
    recomputed: bool = True

    def ops(self, case: str) -> tuple[str, ...]:
        """Ops that ``case`` calls, optional ones left out."""
        return self.trainer if case in TRAINER else self.prefill if case == "engine_prefill" else self.decode

    @property
    def cases(self) -> tuple[str, ...]:
        """Cases in which the region takes part."""
        return tuple(case for case in CASES if self.ops(case))

    def must_serve(self, case: str) -> tuple[str, ...]:
        """Ops without which an execution of ``case`` left the library."""
        return () if case == "trainer_recompute" and not self.recomputed else self.ops(case)


def _everywhere(name: str, *ops: str, optional: tuple[str, ...] = (), recomputed: bool = True) -> Region:
    return Region(name, ops, ops, ops, optional, recomputed)


_ENDS = (
    _everywhere("embedding", "embedding.embedding", optional=("collective.rows_of_owners",), recomputed=False),
    _everywhere("rope_table", "rope.rope_table", recomputed=False),
    _everywhere("lm_head", "matmul.lm_head", recomputed=False),
    Region(
        "logprob",
        ("logprob.scale_by_temperature", "logprob.token_logprob"),
        ("logprob.scale_by_temperature", "logprob.log_softmax"),
        ("logprob.scale_by_temperature", "logprob.log_softmax"),
        optional=("logprob.log_softmax",),
        recomputed=False,
    ),
    Region("sampling", (), ("sampling.draw",), ("sampling.draw",), optional=("sampling.split_greedy", "sampling.first_maximum")),
)

_LAYERS = (
    _everywhere("linear", "matmul.linear"),
    _everywhere("row_parallel_linear", "matmul.row_parallel_linear"),
    _everywhere("collective", "collective.column_parallel_input"),
    _everywhere("rope", "rope.apply_rope"),
    Region(
        "attention",
        ("attention.varlen",),
        ("attention.paged", "attention.write_cache"),
        ("attention.paged", "attention.write_cache"),
    ),
)

_QWEN3 = (*_ENDS, *_LAYERS, _everywhere("norm", "norm.rms_norm", "norm.add_rms_norm", optional=("norm.residual_add",)))

_DENSE_MLP = (_everywhere("activation", "activation.silu_mul"),)

_HYBRID = (
    *_ENDS,
    *_LAYERS,
    _everywhere(
        "norm", "norm.zero_centered_rms_norm", "norm.add_zero_centered_rms_norm", "norm.gated_rms_norm", optional=("norm.residual_add",)
    ),
    _everywhere("activation", "activation.silu_mul", "activation.sigmoid_gate"),
    # A fused form may take the place of the edges; it is listed as what it is, another op.
    _everywhere("gdn_edges", "gdn.gating", "gdn.l2norm", optional=("gdn.mixer_inputs", "gdn.mixer_step_inputs")),
    Region("gdn_conv", ("gdn.conv1d",), ("gdn.conv1d",), ("gdn.conv1d_step",), optional=("gdn.conv1d", "gdn.conv1d_step")),
    Region(
        "gdn_core", ("gdn.cpr_wy",), ("gdn.cpr_wy_prefill",), ("gdn.cpr_wy_decode",), optional=("gdn.cpr_wy_prefill", "gdn.cpr_wy_decode")
    ),
)


def _experts(*optional: str) -> tuple[Region, ...]:
    """Routed experts; Qwen3 MoE may hold dense layers among the sparse ones. ``optional``: further ops of the router's training."""
    training = ("moe.tokens_per_expert", "moe.load_balancing_loss", *optional)
    return (
        _everywhere("router", "moe.router_logits", "moe.route", optional=training),
        _everywhere("experts", "moe.dispatch", "moe.expert_mlp", "moe.combine", optional=("activation.silu_mul",)),
    )


_EXPERTS = _experts()

#: HF architecture -> regions of its logprob path, with the core form ``cpr_wy``; see :func:`regions`.
REGIONS: dict[str, tuple[Region, ...]] = {
    "Qwen3ForCausalLM": _QWEN3 + _DENSE_MLP,
    "Qwen3MoeForCausalLM": _QWEN3 + _EXPERTS,
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5ForConditionalGeneration": _HYBRID,
    "Qwen3_5MoeForCausalLM": _HYBRID + _EXPERTS,
    "Qwen3_5MoeForConditionalGeneration": _HYBRID + _EXPERTS,
    "Glm4MoeLiteForCausalLM": _QWEN3 + _DENSE_MLP + _experts("moe.update_expert_bias"),
}


def regions(architecture: str, gdn_form: str) -> tuple[Region, ...]:
    """Regions of an architecture whose Gated DeltaNet core, if it has one, is of ``gdn_form``; () where it is not known."""

    def formed(ops: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(op.replace("gdn.cpr_wy", f"gdn.{gdn_form}") for op in ops)

    return tuple(
        r._replace(trainer=formed(r.trainer), prefill=formed(r.prefill), decode=formed(r.decode), optional=formed(r.optional))
        for r in REGIONS.get(architecture, ())
    )


def is_hybrid(architecture: str) -> bool:
    """Whether the architecture has Gated DeltaNet layers."""
    return any(region.name == "gdn_core" for region in REGIONS.get(architecture, ()))


#: Architectures whose router adds a bias per expert to the scores that it ranks.
BIASED_ROUTERS = ("Glm4MoeLiteForCausalLM",)


def has_experts(architecture: str) -> bool:
    """Whether the architecture has layers with routed experts."""
    return any(region.name == "experts" for region in REGIONS.get(architecture, ()))


def dtypes(architecture: str) -> dict[str, str]:
    """dtype of every parameter (by the end of its name; ``*``: of all others), buffer and state."""
    found = {"*": "bfloat16", "kv_cache": "bfloat16", "logits": "float32", "logprobs": "float32", "rope_table": "float32"}
    if is_hybrid(architecture):
        # exp(A_log) of a bf16 A_log is another number; a bf16 state makes every split of a sequence visible.
        found |= {"A_log": "float32", "dt_bias": "float32", "gdn_state": "float32", "gdn_conv_window": "bfloat16"}
    if architecture in BIASED_ROUTERS:
        found["e_score_correction_bias"] = "float32"  # a rounded bias would choose other experts
    return found


def obligations(architecture: str) -> dict[str, tuple[str, ...]]:
    """State that outlives a step -> the events after which it must not be read."""
    found = {"kv_cache": ("preemption", "weight_sync"), "prefix_cache": ("weight_sync",)}
    if is_hybrid(architecture):
        found |= {"gdn_state": ("preemption", "weight_sync"), "gdn_open_chunk": ("preemption", "weight_sync")}
    return found
