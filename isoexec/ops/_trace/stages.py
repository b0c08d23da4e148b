"""What the recorder reads of each op: the one place that says how an op's token rows are found.

A *stage* is the name under which two ops that do the same work in different cases are compared (``attention``: one packed op in the
trainer, a cache write and a paged op in the engine). An op that fuses two others is two stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isoexec.ops._trace import context


class Read(NamedTuple):
    """A stage of an op.

    Attributes:
        stage: name that is compared.
        inputs: arguments whose leading dimension is tokens.
        outputs: names of the op's results; "" for one that has no token rows or belongs to another stage.
        results: name of an input -> index of the result that it is (of a fused op's second stage).
        weights: arguments that are parameters.
        constants: arguments that are numbers.
        sampling: arguments that say what is sampled; one number for all tokens, or one each.
        positions: arguments, rows -> position of each row as the op sees it; ``reads`` names the arguments.
        history: arguments, rows -> digests of what each row sees of its past; only at level ``state``.
        pieces: arguments -> (slots, states) of an op that keeps a state; only at level ``state``.
        free: the columns of the first product of a layer, in whatever order its runtime stores them.
    """

    stage: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("out",)
    results: dict[str, int] = {}
    weights: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    sampling: tuple[str, ...] = ()
    positions: Callable | None = None
    history: Callable | None = None
    pieces: Callable | None = None
    free: bool = False


def _norm(name: str, *extra: str) -> Read:
    return Read(name, ("x", *extra), weights=("weight",), constants=("eps",))


def _fused_norm(norm: str) -> tuple[Read, Read]:
    return (
        Read("norm.residual_add", ("x", "residual"), outputs=("", "out")),
        Read(norm, (), outputs=("out", ""), results={"x": 1}, weights=("weight",), constants=("eps",)),
    )


def _core(positions: Callable, pieces: Callable | None) -> Read:
    return Read("gdn.core", ("q", "k", "v", "g", "beta"), constants=("scale",), positions=positions, pieces=pieces)


def _step(name: str, inputs: tuple[str, ...], weights: tuple[str, ...]) -> Read:
    """A decode step that takes more than the core: a stage of its own."""
    return Read(name, inputs, weights=weights, constants=("scale", "eps"), positions=context.of_steps, pieces=context.single_pieces)


_TRAIN = _core(context.of_plan, None)
_PREFILL = _core(context.of_plan, context.planned_pieces)
_DECODE = _core(context.of_steps, context.single_pieces)
_MIXER = Read(
    "gdn.mixer_inputs",
    ("x", "a", "b"),
    outputs=("q", "k", "v", "g", "beta", ""),
    weights=("weight", "A_log", "dt_bias"),
    constants=("eps",),
    history=context.of_window,
)
_CONV = dict(inputs=("x",), outputs=("out", ""), weights=("weight",), history=context.of_window)

#: Op -> its stages. Ops of the trainer's statistics, which no logprob depends on, have none.
STAGES: dict[str, tuple[Read, ...]] = {
    "embedding.embedding": (Read("embedding.embedding", sampling=("ids",), weights=("weight",)),),
    "collective.rows_of_owners": (Read("collective.rows_of_owners", ("rows",)),),
    "collective.column_parallel_input": (Read("collective.column_parallel_input", ("x",)),),
    "rope.rope_table": (Read("rope.rope_table", (), ("cos", "sin"), constants=("rotary_dim", "theta"), positions=context.of_steps),),
    "rope.apply_rope": (Read("rope.apply_rope", ("x", "cos", "sin"), constants=("interleaved",)),),
    "norm.residual_add": (Read("norm.residual_add", ("x", "residual")),),
    "norm.rms_norm": (_norm("norm.rms_norm"),),
    "norm.zero_centered_rms_norm": (_norm("norm.zero_centered_rms_norm"),),
    "norm.gated_rms_norm": (_norm("norm.gated_rms_norm", "gate"),),
    "norm.add_rms_norm": _fused_norm("norm.rms_norm"),
    "norm.add_zero_centered_rms_norm": _fused_norm("norm.zero_centered_rms_norm"),
    "matmul.linear": (Read("matmul.linear", ("x",), weights=("weight",), free=True),),
    "matmul.row_parallel_linear": (Read("matmul.row_parallel_linear", ("x",), weights=("weight",), constants=("leaves",)),),
    "matmul.lm_head": (Read("matmul.lm_head", ("x",), weights=("weight",)),),
    "activation.silu_mul": (Read("activation.silu_mul", ("gate_up",)),),
    "activation.sigmoid_gate": (Read("activation.sigmoid_gate", ("x", "gate")),),
    "attention.varlen": (
        Read("attention", ("q", "k", "v"), constants=("scale", "kv_block"), positions=context.of_bounds, history=context.of_packed),
    ),
    "attention.write_cache": (Read("attention", ("k", "v"), outputs=()),),
    "attention.paged": (Read("attention", ("q",), constants=("scale", "kv_block"), positions=context.of_pages, history=context.of_cache),),
    "gdn.conv1d": (Read("gdn.conv1d", positions=context.of_plan, **_CONV),),
    "gdn.conv1d_step": (Read("gdn.conv1d", **_CONV),),
    "gdn.gating": (Read("gdn.gating", ("a", "b"), ("g", "beta"), weights=("A_log", "dt_bias")),),
    "gdn.l2norm": (Read("gdn.l2norm", ("x",), constants=("eps",)),),
    "gdn.mixer_inputs": (_MIXER._replace(positions=context.of_plan),),
    "gdn.mixer_step_inputs": (_MIXER,),
    "gdn.cpr_wy": (_TRAIN,),
    "gdn.cpr_wy_prefill": (_PREFILL,),
    "gdn.cpr_wy_decode": (_DECODE,),
    "gdn.cpr_wy_step": (_step("gdn.cpr_wy_step", ("y", "a", "b"), ("A_log", "dt_bias")),),
    "gdn.mixer_step": (_step("gdn.mixer_step", ("x", "a", "b", "z"), ("weight", "A_log", "dt_bias", "norm_weight")),),
    "gdn.cpr": (_TRAIN,),
    "gdn.cpr_prefill": (_PREFILL,),
    "gdn.cpr_decode": (_DECODE,),
    "moe.router_logits": (Read("moe.router_logits", ("x",), weights=("weight",)),),
    "moe.route": (
        Read(
            "moe.route",
            ("logits",),
            ("weights", "experts"),
            weights=("expert_bias",),
            constants=("top_k", "renormalize", "scoring", "scale", "n_group", "topk_group"),
        ),
    ),
    "moe.dispatch": (Read("moe.dispatch", ("x", "weights", "experts"), ("x out", "weights out", "experts out", "")),),
    "moe.expert_mlp": (Read("moe.expert_mlp", ("x", "experts"), weights=("gate_up", "down")),),
    "moe.combine": (Read("moe.combine", ("values", "weights", "experts", "shared"), constants=("num_experts", "combine_groups")),),
    "logprob.scale_by_temperature": (Read("logprob.scale_by_temperature", ("logits",), sampling=("temperature",)),),
    "logprob.log_softmax": (Read("logprob.log_softmax", ("logits",), ("row",), constants=("vocab_size", "vocab_block")),),
    "logprob.token_logprob": (
        Read("logprob.log_softmax", ("logits",), ("logprob",), sampling=("tokens",), constants=("vocab_size", "vocab_block")),
    ),
    "sampling.draw": (Read("logprob.log_softmax", (), ("tokens",)),),
}

#: Stages of level ``layers``: the residual stream and what follows the last layer.
COARSE = ("embedding.embedding", "norm.residual_add", "matmul.lm_head", "logprob.log_softmax")
