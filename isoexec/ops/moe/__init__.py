"""Mixture of experts: router, grouped expert MLP, and a combine whose order is the experts', never the layout's.

``router_logits`` -> ``route`` -> ``dispatch`` -> ``expert_mlp`` -> ``combine``. Experts lie in ``combine_groups`` contiguous groups; a group is
summed in ascending expert index, groups by the balanced binary tree. An expert-parallel rank owns an aligned run of groups, hence a subtree: it
sends one fp32 partial per token, and every degree that divides ``combine_groups`` gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from isoexec.contract.build import combine_groups_for as combine_groups_for
from isoexec.ops._core.registry import op
from isoexec.ops.matmul.checks import check_operands
from isoexec.ops.moe.checks import check_combine, check_dispatch, check_expert_mlp, check_route


@dataclass(frozen=True)
class ExpertParallel:
    """An expert-parallel group; rank r of n holds experts [r E / n, (r + 1) E / n).

    Attributes:
        group: process group; its size must divide ``combine_groups``.
        replicated: True when every rank holds the same tokens (an engine that runs its tensor-parallel group as an expert-parallel one),
            False when each rank brings its own tokens, in any number (a trainer whose expert-parallel ranks are data- or sequence-parallel).
    """

    group: dist.ProcessGroup
    replicated: bool = False


@op(
    "moe.router_logits",
    cpu=".reference:router_logits", cuda=".gpu:router_logits",
    hazards=("logits rounded to bf16 make ties that fp32 logits do not have",), check=partial(check_operands, "moe.router_logits"),
)  # fmt: skip
def router_logits(x, weight):
    """Router product: bf16 operands, fp32 accumulation in ascending K, fp32 logits.

    Args:
        x: [T, D] bf16.
        weight: [E, D] bf16.

    Returns:
        [T, E] fp32. Differentiable.
    """


@op(
    "moe.route",
    cpu=".reference:route", cuda=".gpu:route",
    hazards=(
        "a library's top-k leaves ties unspecified and its order may depend on whether gradients are on",
        "-0.0 and 0.0 are equal scores; a comparison of bits would order them",
        "NaN compares false both ways and can make a sort inconsistent",
    ),
    check=check_route,
)
def route(logits, *, top_k, renormalize, scoring="softmax", expert_bias=None, scale=1.0, n_group=1, topk_group=1):
    """Choose ``top_k`` experts per token and their combine weights, in rank order with gradients on or off.

    Scores are softmax(logits) over all experts (exact maximum, row sum, true division) or sigmoid(logits). Experts are ranked by score
    (``scoring="sigmoid"``: by score + ``expert_bias``), ties to the lowest index, -0.0 equal to 0.0. Weights are the scores without bias;
    with ``renormalize`` divided by their sum taken in rank order (sigmoid: plus 1e-20, as DeepSeek-V3), then times ``scale``.
    With ``n_group`` > 1 only experts of the ``topk_group`` best groups of E / n_group neighbours stand for choice (DeepSeek-V3); a group's
    score is the sum of its two best ranking scores, ties between groups go to the lowest index.

    NaN ranks below every number. A NaN logit makes its whole softmax row NaN, so such a token takes experts 0 .. top_k - 1 with NaN weights: the
    fault stays in its row and reaches that row's logprob, where it is seen; other rows keep their bits. It is not refused here, since padded
    lanes of an engine step may hold anything.

    Args:
        logits: [T, E] fp32.
        top_k: int in [1, E].
        renormalize: bool, ``norm_topk_prob`` of the checkpoint.
        scoring: "softmax" or "sigmoid".
        expert_bias: [E] fp32 or None, auxiliary-loss-free balancing (arXiv 2408.15664); only with "sigmoid". Not differentiated.
        scale: float, ``routed_scaling_factor``; rounded to fp32.
        n_group, topk_group: int, groups that E is cut into and groups that stay; only with "sigmoid".

    Returns:
        (weights [T, top_k] fp32, experts [T, top_k] int64). ``weights`` is differentiable in ``logits``.

    Raises:
        ContractError: another dtype or shape, unknown scoring, bias or groups with softmax, top_k outside [1, E] or larger than the groups that stay hold, or
            groups of fewer than two experts.
    """


@op("moe.dispatch", cpu=".parallel:dispatch", cuda=".parallel:dispatch", check=check_dispatch)
def dispatch(x, weights, experts, *, ep=None):
    """Tokens as the rank's experts see them.

    Forward: identity without ``ep`` or with replicated tokens, else the rows of all ranks, concatenated in rank order. Backward: the ranks'
    gradients are added by the balanced tree over ranks, since each rank's experts contribute a part.

    Args:
        x: [T, D] bf16; weights: [T, k] fp32; experts: [T, k] int64, global indices.
        ep: :class:`ExpertParallel` or None.

    Returns:
        (x, weights, experts, rows): T' rows each, and every rank's row count (tuple of int; None unless tokens are sharded) for
        :func:`combine`.
    """


@op(
    "moe.expert_mlp",
    cpu=".grouped:expert_mlp", cuda=".gpu:expert_mlp",
    hazards=(
        "an expert's rows must not depend on how many rows, or whose, are computed beside them",
        "K split over ranks (expert tensor parallelism) would add a reduction that the schedule does not have",
    ),
    check=check_expert_mlp,
)
def expert_mlp(x, experts, gate_up, down, *, ep=None):
    """SwiGLU of every (token, chosen expert) pair: gate and up rounded to bf16, silu * mul in fp32 rounded once, down rounded to bf16.

    Args:
        x: [T, D] bf16.
        experts: [T, k] int64, global indices.
        gate_up: [E', 2 F, D] bf16 (gate rows, then up rows), the experts this rank holds, or a sequence of E' tensors [2 F, D].
        down: [E', D, F] bf16 or a sequence of E' tensors [D, F].
        ep: :class:`ExpertParallel` or None: rank r holds experts r E' .. (r + 1) E' - 1.

    Returns:
        [T, k, D] bf16, +0.0 for pairs whose expert is not held. Differentiable in ``x`` and the weights; an expert without tokens gets a
        gradient of zeros.
    """


@op(
    "moe.combine",
    cpu=".reference:combine", cuda=".gpu:combine",
    hazards=(
        "scatter-add has no order on a GPU, and token order inside an expert is not the token's own order of experts",
        "two terms commute: only top-k >= 4 shows an order fault",
        "an accumulator that starts from -0.0 or from the first term keeps a sign of zero that another split loses",
    ),
    check=check_combine,
)
def combine(values, weights, experts, shared=None, *, num_experts, combine_groups, rows=None, ep=None):
    """Weighted sum over a token's experts, fp32, one rounding (docs/schedule.md, combine).

    Inside a group weight * value is added to +0.0 in ascending expert index; a group with none is +0.0; groups are added by the balanced
    binary tree; ``shared`` is added last.

    Args:
        values: [T', k, D] bf16, as :func:`expert_mlp` gives them (T' rows of :func:`dispatch`).
        weights: [T', k] fp32; experts: [T', k] int64, distinct within a row.
        shared: [T, D] bf16, the gated value of the shared expert, or None.
        num_experts: E, of the whole model.
        combine_groups: E_G of the contract; must divide E (see :func:`combine_groups_for`).
        rows: fourth result of :func:`dispatch`.
        ep: :class:`ExpertParallel` or None.

    Returns:
        [T, D] bf16, this rank's own tokens. Differentiable in ``values``, ``weights`` and ``shared``.

    Raises:
        ContractError: ``combine_groups`` does not divide ``num_experts``, or the size of ``ep`` does not divide ``combine_groups``.
    """


@op("moe.tokens_per_expert", cpu=".reference:tokens_per_expert", cuda=".gpu:tokens_per_expert")
def tokens_per_expert(experts, *, num_experts, valid=None):
    """Count of (token, expert) pairs by expert: integers, so that ranks may add them in any order.

    Args:
        experts: [T, k] int64; num_experts: E; valid: [T] bool or None, False rows are not counted.

    Returns:
        [E] int64.
    """


@op("moe.load_balancing_loss", cpu=".reference:load_balancing_loss", cuda=".reference:load_balancing_loss")
def load_balancing_loss(logits, counts, *, total_tokens, top_k, coefficient, scoring="softmax", valid=None):
    """Auxiliary loss of the Switch Transformer (arXiv 2101.03961): coefficient * E * sum_e f_e P_e, fp32.

    f_e = counts_e / (top_k * total_tokens); P_e = sum over this rank's tokens of the score of e, over total_tokens; sigmoid scores are divided
    by their sum over experts first. With counts and total_tokens taken over a group of ranks, the ranks' losses add up to the group's.

    Args:
        logits: [T, E] fp32.
        counts: [E] int64, see :func:`tokens_per_expert`; a constant for the gradient.
        total_tokens: int, tokens behind ``counts``.
        top_k, scoring: as in :func:`route`; coefficient: float.
        valid: [T] bool or None, False rows are excluded by selection.

    Returns:
        scalar fp32. Differentiable in ``logits``.
    """


@op("moe.update_expert_bias", cpu=".reference:update_expert_bias", cuda=".reference:update_expert_bias")
def update_expert_bias(expert_bias, counts, *, rate):
    """Auxiliary-loss-free balancing (arXiv 2408.15664): bias + rate * sign(mean(counts) - counts).

    The comparison is made in integers (E * counts against their sum), so that a rounded mean cannot flip a sign.

    Args:
        expert_bias: [E] fp32; counts: [E] int64, of the whole batch; rate: float, rounded to fp32.

    Returns:
        [E] fp32.
    """
