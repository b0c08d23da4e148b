"""Qwen3.5 dense (text), written with ops only: Gated DeltaNet layers and gated full-attention layers, zero-centred norms.

Shape suffixes: T tokens of a packed batch, D hidden, H query heads, G key/value heads, K head size, F MLP width; in Gated DeltaNet
H key heads, J value heads, K key size, V value size, C = 2 H K + J V convolved channels.
Source: HF transformers ``Qwen3_5ForCausalLM``. Text positions are equal in the three sections of its interleaved mRoPE, which then is
plain rope over the leading ``partial_rotary_factor`` of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from isoexec.contract import Numerics
from isoexec.models import qwen3
from isoexec.ops import activation, collective, gdn, matmul, norm, rope

Tensor = torch.Tensor


class GatedAttention(NamedTuple):
    """``split_qkv`` turns the product with ``qkv`` into q [T, H, K], gate [T, H, K], k and v [T, G, K], whatever the order of its rows."""

    qkv: Tensor  # [(2 H + 2 G) K, D]
    split_qkv: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    q_norm: Tensor  # [K]
    k_norm: Tensor  # [K]
    o: Tensor  # [D, H K]
    eps: float


class GatedDeltaNet(NamedTuple):
    """``split`` turns the products with each of ``in_proj`` (one weight, or qkvz and ba apart) into qkv [T, C] (q heads, k heads, v heads),
    z [T, J, V], b and a [T, J]."""

    in_proj: tuple[Tensor, ...]  # [C + J V + 2 J, D] in all
    split: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    conv: Tensor  # [C, W], oldest tap first
    A_log: Tensor  # [J] fp32
    dt_bias: Tensor  # [J] fp32
    norm: Tensor  # [V]
    out_proj: Tensor  # [D, J V]
    key_dim: int  # K
    value_dim: int  # V
    eps: float


class MLP(NamedTuple):
    gate_up: Tensor  # [2 F, D]
    down: Tensor  # [D, F]


class Qwen35Layer(NamedTuple):
    input_norm: Tensor  # [D], as the checkpoint has it (the norm is 1 + w)
    mixer: GatedAttention | GatedDeltaNet
    post_attention_norm: Tensor  # [D]
    mlp: MLP
    eps: float


def attention_layer(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    layer: Qwen35Layer,
    rope_table: tuple[Tensor, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    numerics: Numerics,
    tp: collective.TensorParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """A full-attention layer on the residual stream ``x + residual``.

    Args:
        x_TD: output of the previous block, bf16; the stream itself when ``residual_TD`` is None.
        residual_TD: the stream before ``x_TD`` was added, bf16, or None in the first layer.
        layer: parameters, the mixer a :class:`GatedAttention`.
        rope_table: (cos, sin) of the tokens' positions, ``rotary_dim`` = head size * ``partial_rotary_factor``.
        attend: (q [T, H, K], k [T, G, K], v [T, G, K]) -> [T, H, K], the runtime's packed or paged attention op.
        numerics: constants of the contract.
        tp: tensor-parallel group, or None.

    Returns:
        (x_TD, residual_TD), not yet added.
    """
    x_TD, residual_TD = input_norm(x_TD, residual_TD, layer.input_norm, layer.eps)
    x_TD = attention_block(x_TD, layer.mixer, rope_table, attend, numerics, tp)
    x_TD, residual_TD = post_attention_norm(x_TD, residual_TD, layer)
    return qwen3.mlp_block(x_TD, *layer.mlp, numerics, tp), residual_TD


def gdn_layer(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    layer: Qwen35Layer,
    convolve: Callable[[Tensor, Tensor], Tensor],
    mix: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
    numerics: Numerics,
    tp: collective.TensorParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """A Gated DeltaNet layer on the residual stream; ``convolve`` and ``mix`` as :func:`gdn_block`, the rest as :func:`attention_layer`."""
    x_TD, residual_TD = input_norm(x_TD, residual_TD, layer.input_norm, layer.eps)
    x_TD = gdn_block(x_TD, layer.mixer, convolve, mix, numerics, tp)
    x_TD, residual_TD = post_attention_norm(x_TD, residual_TD, layer)
    return qwen3.mlp_block(x_TD, *layer.mlp, numerics, tp), residual_TD


def input_norm(x_TD: Tensor, residual_TD: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """First norm of a layer; adds the residual stream, or begins it where there is none."""
    if residual_TD is None:
        return norm.zero_centered_rms_norm(x_TD, weight, eps), x_TD
    return norm.add_zero_centered_rms_norm(x_TD, residual_TD, weight, eps)


def post_attention_norm(x_TD, residual_TD, layer) -> tuple[Tensor, Tensor]:
    """Norm between mixer and MLP."""
    return norm.add_zero_centered_rms_norm(x_TD, residual_TD, layer.post_attention_norm, layer.eps)


def attention_block(x_TD, mixer: GatedAttention, rope_table, attend, numerics: Numerics, tp=None) -> Tensor:
    """Attention with zero-centred q/k norm, partial rotary embedding and output gate; ``x_TD`` is already normed."""
    x_TD = collective.column_parallel_input(x_TD, tp=tp)
    q_THK, gate_THK, k_TGK, v_TGK = mixer.split_qkv(matmul.linear(x_TD, mixer.qkv))
    cos, sin = rope_table
    q_THK = rope.apply_rope(norm.zero_centered_rms_norm(q_THK, mixer.q_norm, mixer.eps), cos, sin)
    k_TGK = rope.apply_rope(norm.zero_centered_rms_norm(k_TGK, mixer.k_norm, mixer.eps), cos, sin)
    o_THK = activation.sigmoid_gate(attend(q_THK, k_TGK, v_TGK), gate_THK)
    return matmul.row_parallel_linear(o_THK.flatten(1), mixer.o, leaves=numerics.row_leaves, tp=tp)


def gdn_block(x_TD, mixer: GatedDeltaNet, convolve, mix, numerics: Numerics, tp=None) -> Tensor:
    """Gated DeltaNet mixer; ``x_TD`` is already normed. The callbacks know where a sequence's state is; they call ops and nothing else.

    Args:
        convolve: (qkv [T, C], weight [C, W]) -> [T, C], the op ``gdn.conv1d`` or ``gdn.conv1d_step`` with the runtime's windows.
        mix: (q [T, H, K], k [T, H, K], v [T, J, V], g [T, J], beta [T, J]) -> [T, J, V], the op of the contract's form with its states.
    """
    x_TD = collective.column_parallel_input(x_TD, tp=tp)
    qkv_TC, z_TJV, b_TJ, a_TJ = mixer.split(*(matmul.linear(x_TD, weight) for weight in mixer.in_proj))
    o_TJV = gdn_mixer(qkv_TC, z_TJV, b_TJ, a_TJ, mixer, convolve, mix)
    return matmul.row_parallel_linear(o_TJV.flatten(1), mixer.out_proj, leaves=numerics.row_leaves, tp=tp)


def gdn_mixer(qkv_TC, z_TJV, b_TJ, a_TJ, mixer: GatedDeltaNet, convolve, mix) -> Tensor:
    """What of :func:`gdn_block` lies between the projections -> [T, J, V]; ``mixer`` without its projections will do."""
    q_THK, k_THK, v_TJV = split_heads(convolve(qkv_TC, mixer.conv), mixer)
    g_TJ, beta_TJ = gdn.gating(a_TJ, b_TJ, mixer.A_log, mixer.dt_bias)
    o_TJV = mix(gdn.l2norm(q_THK), gdn.l2norm(k_THK), v_TJV, g_TJ, beta_TJ)
    return norm.gated_rms_norm(o_TJV, z_TJV, mixer.norm, mixer.eps)


def split_heads(qkv_TC: Tensor, mixer: GatedDeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved channels -> q and k [T, H, K], v [T, J, V], views."""
    values = mixer.A_log.shape[0] * mixer.value_dim
    keys = (qkv_TC.shape[-1] - values) // 2
    q_TC, k_TC, v_TC = qkv_TC.split((keys, keys, values), -1)
    heads = (-1, mixer.key_dim)
    return q_TC.unflatten(-1, heads), k_TC.unflatten(-1, heads), v_TC.unflatten(-1, (-1, mixer.value_dim))


def final_norm(x_TD: Tensor, residual_TD: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Last norm; adds the residual stream when it is still apart."""
    return input_norm(x_TD, residual_TD, weight, eps)[0]
