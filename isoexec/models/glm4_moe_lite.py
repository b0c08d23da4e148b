"""GLM-4.7-Flash, written with ops only: multi-head latent attention, sigmoid-routed experts with a bias, one shared expert.

Latent attention has one form for all cases: keys and values are made of the latent before attention, per head, and cached so. The absorbed
form, which multiplies queries into the latent instead, is another order of products and hence other bits.

Shape suffixes: T tokens of a packed batch, D hidden, L latent, H heads, N channels of a head without rotary embedding and R with it,
K = N + R, V value channels of a head, F MLP width.
Source: HF transformers ``Glm4MoeLiteForCausalLM``. The latent norms take ``rms_norm_eps``, as vLLM and Megatron do; HF's have 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from isoexec.contract import Numerics
from isoexec.models import qwen3, qwen3_moe
from isoexec.models.qwen3_5 import MLP
from isoexec.ops import collective, matmul, moe, norm, rope

Tensor = torch.Tensor

final_norm = qwen3.final_norm


class LatentAttention(NamedTuple):
    q_a: Tensor  # [L, D], on every rank
    q_a_norm: Tensor  # [L]
    q_b: Tensor  # [H K, L]
    kv_a: Tensor  # [L' + R, D], on every rank
    kv_a_norm: Tensor  # [L']
    kv_b: Tensor  # [H (N + V), L']
    o: Tensor  # [D, H V]
    nope_dim: int  # N
    rope_dim: int  # R
    value_dim: int  # V, at most K
    eps: float


class Glm4MoeLiteLayer(NamedTuple):
    input_norm: Tensor  # [D]
    attention: LatentAttention
    post_attention_norm: Tensor  # [D]
    mlp: MLP | qwen3_moe.SparseMLP
    shared: MLP | None  # of a sparse layer
    eps: float


def decoder_layer(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    layer: Glm4MoeLiteLayer,
    rope_table: tuple[Tensor, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    numerics: Numerics,
    tp: collective.TensorParallel | None = None,
    ep: moe.ExpertParallel | None = None,
    on_route: qwen3_moe.OnRoute | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer, dense or sparse, on the residual stream ``x + residual``.

    Args:
        x_TD: output of the previous block, bf16; the stream itself when ``residual_TD`` is None.
        residual_TD: the stream before ``x_TD`` was added, bf16, or None in the first layer.
        layer: parameters.
        rope_table: (cos, sin) of the tokens' positions, ``rotary_dim`` = R.
        attend: (q, k, v, each [T, H, K]) -> [T, H, K], the runtime's packed or paged attention op at the scale K^-0.5.
        numerics: constants of the contract.
        tp: tensor-parallel group, or None.
        ep, on_route: as :func:`isoexec.models.qwen3_moe.sparse_mlp_block`.

    Returns:
        (x_TD, residual_TD), not yet added.
    """
    x_TD, residual_TD = qwen3.input_norm(x_TD, residual_TD, layer.input_norm, layer.eps)
    x_TD = attention_block(x_TD, layer.attention, rope_table, attend, numerics, tp)
    x_TD, residual_TD = norm.add_rms_norm(x_TD, residual_TD, layer.post_attention_norm, layer.eps)
    if isinstance(layer.mlp, MLP):
        return qwen3.mlp_block(x_TD, *layer.mlp, numerics, tp), residual_TD
    shared_TD = None if layer.shared is None else qwen3.mlp_block(x_TD, *layer.shared, numerics, tp)
    return qwen3_moe.sparse_mlp_block(x_TD, layer.mlp, numerics, shared_TD=shared_TD, ep=ep, on_route=on_route), residual_TD


def attention_block(x_TD, a: LatentAttention, rope_table, attend, numerics: Numerics, tp=None) -> Tensor:
    """Latent attention with per-head keys and values; ``x_TD`` is already normed."""
    q_TL = norm.rms_norm(matmul.linear(x_TD, a.q_a), a.q_a_norm, a.eps)
    kv_TL, k_rope_TR = matmul.linear(x_TD, a.kv_a).split((a.kv_a_norm.shape[0], a.rope_dim), -1)
    kv_TL = norm.rms_norm(kv_TL, a.kv_a_norm, a.eps)
    # Each rank has the latents of its tokens whole; from here on a rank has all tokens and its own heads.
    q_TL, kv_TL, k_rope_TR = (collective.column_parallel_input(x, tp=tp) for x in (q_TL, kv_TL, k_rope_TR))
    q_THK = matmul.linear(q_TL, a.q_b).unflatten(-1, (-1, a.nope_dim + a.rope_dim))
    k_THN, v_THV = matmul.linear(kv_TL, a.kv_b).unflatten(-1, (-1, a.nope_dim + a.value_dim)).split((a.nope_dim, a.value_dim), -1)
    q_THK, k_THK = rotate(q_THK, k_THN, k_rope_TR, rope_table)
    o_THK = attend(q_THK, k_THK, padded(v_THV, q_THK.shape[-1]))
    return matmul.row_parallel_linear(o_THK[..., : a.value_dim].flatten(1), a.o, leaves=numerics.row_leaves, tp=tp)


def rotate(q_THK: Tensor, k_THN: Tensor, k_rope_TR: Tensor, rope_table) -> tuple[Tensor, Tensor]:
    """q and k [T, H, K]: the last R channels rotated in interleaved pairs; those of k are one vector for all heads."""
    cos, sin = rope_table
    heads, nope = k_THN.shape[1:]
    q_THN, q_THR = q_THK.split((nope, q_THK.shape[-1] - nope), -1)
    q_THR = rope.apply_rope(q_THR, cos, sin, interleaved=True)
    k_T1R = rope.apply_rope(k_rope_TR.unsqueeze(1), cos, sin, interleaved=True)
    return torch.cat([q_THN, q_THR], -1), torch.cat([k_THN, k_T1R.expand(-1, heads, -1)], -1)


def padded(v_THV: Tensor, size: int) -> Tensor:
    """Values with zero channels up to the head size of queries and keys, since a cache and an attention op know one size."""
    missing = size - v_THV.shape[-1]
    return v_THV if not missing else torch.cat([v_THV, v_THV.new_zeros(*v_THV.shape[:-1], missing)], -1)
