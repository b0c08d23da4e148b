"""Qwen3 dense, written with ops only. vLLM's and Megatron's adapters both run these functions.

Shape suffixes: T tokens of a packed batch, D hidden, H query heads, G key/value heads, K head size, F MLP width.
Source: HF transformers ``Qwen3ForCausalLM``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from isoexec.contract import Numerics
from isoexec.ops import activation, collective, matmul, norm, rope

Tensor = torch.Tensor


class Qwen3Layer(NamedTuple):
    """One decoder layer's parameters as a runtime holds them.

    ``split_qkv`` turns the product with ``qkv`` [T, (H + 2 G) K] into views q [T, H, K], k and v [T, G, K]; runtimes store the rows of
    ``qkv`` in different orders, which moves no bit (a column of a product depends on its row of the weight alone).
    """

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(H + 2 G) K, D]
    split_qkv: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    q_norm: Tensor  # [K]
    k_norm: Tensor  # [K]
    o: Tensor  # [D, H K]
    post_attention_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F, D], gate rows then up rows
    down: Tensor  # [D, F]
    eps: float


def decoder_layer(
    x_TD: Tensor,
    residual_TD: Tensor | None,
    layer: Qwen3Layer,
    rope_table: tuple[Tensor, Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    numerics: Numerics,
    tp: collective.TensorParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """One layer on the residual stream ``x + residual``.

    Args:
        x_TD: output of the previous block, bf16; the stream itself when ``residual_TD`` is None.
        residual_TD: the stream before ``x_TD`` was added, bf16, or None in the first layer.
        layer: parameters.
        rope_table: (cos, sin) of the tokens' positions, from :func:`isoexec.ops.rope.rope_table`.
        attend: (q [T, H, K], k [T, G, K], v [T, G, K]) -> [T, H, K], the runtime's packed or paged attention op.
        numerics: constants of the contract.
        tp: tensor-parallel group, or None.

    Returns:
        (x_TD, residual_TD), not yet added.
    """
    x_TD, residual_TD = input_norm(x_TD, residual_TD, layer.input_norm, layer.eps)
    x_TD = attention_block(x_TD, layer, rope_table, attend, numerics, tp)
    x_TD, residual_TD = norm.add_rms_norm(x_TD, residual_TD, layer.post_attention_norm, layer.eps)
    return mlp_block(x_TD, layer.gate_up, layer.down, numerics, tp), residual_TD


def input_norm(x_TD: Tensor, residual_TD: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """First norm of a layer; adds the residual stream, or begins it where there is none."""
    if residual_TD is None:
        return norm.rms_norm(x_TD, weight, eps), x_TD
    return norm.add_rms_norm(x_TD, residual_TD, weight, eps)


def attention_block(x_TD, layer: Qwen3Layer, rope_table, attend, numerics: Numerics, tp=None) -> Tensor:
    """Attention with q/k norm and rotary embedding; ``x_TD`` is already normed."""
    x_TD = collective.column_parallel_input(x_TD, tp=tp)
    q_THK, k_TGK, v_TGK = layer.split_qkv(matmul.linear(x_TD, layer.qkv))
    cos, sin = rope_table
    q_THK = rope.apply_rope(norm.rms_norm(q_THK, layer.q_norm, layer.eps), cos, sin)
    k_TGK = rope.apply_rope(norm.rms_norm(k_TGK, layer.k_norm, layer.eps), cos, sin)
    o_THK = attend(q_THK, k_TGK, v_TGK)
    return matmul.row_parallel_linear(o_THK.flatten(1), layer.o, leaves=numerics.row_leaves, tp=tp)


def mlp_block(x_TD, gate_up, down, numerics: Numerics, tp=None) -> Tensor:
    """SwiGLU MLP; ``x_TD`` is already normed."""
    x_TD = collective.column_parallel_input(x_TD, tp=tp)
    h_TF = activation.silu_mul(matmul.linear(x_TD, gate_up))
    return matmul.row_parallel_linear(h_TF, down, leaves=numerics.row_leaves, tp=tp)


def final_norm(x_TD: Tensor, residual_TD: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Last norm; adds the residual stream when it is still apart."""
    return input_norm(x_TD, residual_TD, weight, eps)[0]
