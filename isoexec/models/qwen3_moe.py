"""Qwen3 MoE, written with ops only. A dense layer of it (``mlp_only_layers``, ``decoder_sparse_step``) is
:func:`isoexec.models.qwen3.decoder_layer`.

Shape suffixes as in :mod:`isoexec.models.qwen3`; E experts, F width of one expert.
Source: HF transformers ``Qwen3MoeForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from isoexec.contract import Numerics
from isoexec.models import qwen3
from isoexec.ops import collective, moe, norm

Tensor = torch.Tensor


class SparseMLP(NamedTuple):
    """Routed experts of one layer as a runtime holds them."""

    router: Tensor  # [E, D], on every rank
    gate_up: Tensor | Sequence[Tensor]  # the held experts: [E', 2 F, D] or E' times [2 F, D]
    down: Tensor | Sequence[Tensor]  # [E', D, F] or E' times [D, F]
    top_k: int
    renormalize: bool  # norm_topk_prob
    scoring: str = "softmax"
    expert_bias: Tensor | None = None  # [E] fp32
    scale: float = 1.0  # routed_scaling_factor
    n_group: int = 1
    topk_group: int = 1


class Qwen3MoELayer(NamedTuple):
    """One decoder layer's parameters; the attention fields are those of :class:`isoexec.models.qwen3.Qwen3Layer`."""

    input_norm: Tensor
    qkv: Tensor
    split_qkv: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    post_attention_norm: Tensor
    mlp: SparseMLP
    eps: float


OnRoute = Callable[[Tensor, Tensor, Tensor], Tensor]


def decoder_layer(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    layer: Qwen3MoELayer,
    rope_table: tuple[Tensor, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    numerics: Numerics,
    tp: collective.TensorParallel | None = None,
    ep: moe.ExpertParallel | None = None,
    on_route: OnRoute | None = None,
) -> tuple[Tensor, Tensor]:
    """One sparse layer on the residual stream; arguments as :func:`isoexec.models.qwen3.decoder_layer`, ``ep`` and ``on_route`` as
    :func:`sparse_mlp_block`."""
    x_TD, residual_TD = qwen3.input_norm(x_TD, residual_TD, layer.input_norm, layer.eps)
    x_TD = qwen3.attention_block(x_TD, layer, rope_table, attend, numerics, tp)
    x_TD, residual_TD = norm.add_rms_norm(x_TD, residual_TD, layer.post_attention_norm, layer.eps)
    return sparse_mlp_block(x_TD, layer.mlp, numerics, ep=ep, on_route=on_route), residual_TD


def sparse_mlp_block(
    x_TD: Tensor,
    mlp: SparseMLP,
    numerics: Numerics,
    *,
    shared_TD: Tensor | None = None,
    ep: moe.ExpertParallel | None = None,
    on_route: OnRoute | None = None,
) -> Tensor:
    """Routed experts, and the gated value of a shared one added last; ``x_TD`` is already normed.

    Args:
        x_TD: this rank's tokens, bf16.
        mlp: parameters.
        numerics: constants of the contract.
        shared_TD: gated value of the shared expert, bf16, or None.
        ep: expert-parallel group, or None.
        on_route: (logits [T, E], weights [T, k], experts [T, k]) -> weights, for a trainer that counts tokens per expert or hangs an
            auxiliary loss on the weights' gradient; it must return the same values.
    """
    logits_TE = moe.router_logits(x_TD, mlp.router)
    weights_Tk, experts_Tk = moe.route(
        logits_TE,
        top_k=mlp.top_k,
        renormalize=mlp.renormalize,
        scoring=mlp.scoring,
        expert_bias=mlp.expert_bias,
        scale=mlp.scale,
        n_group=mlp.n_group,
        topk_group=mlp.topk_group,
    )
    if on_route is not None:
        weights_Tk = on_route(logits_TE, weights_Tk, experts_Tk)
    x_TD, weights_Tk, experts_Tk, rows = moe.dispatch(x_TD, weights_Tk, experts_Tk, ep=ep)
    values_TkD = moe.expert_mlp(x_TD, experts_Tk, mlp.gate_up, mlp.down, ep=ep)
    return moe.combine(
        values_TkD,
        weights_Tk,
        experts_Tk,
        shared_TD,
        num_experts=mlp.router.shape[0],
        combine_groups=numerics.combine_groups,
        rows=rows,
        ep=ep,
    )
