"""Qwen3.5 MoE (text), written with ops only: the layers of :mod:`isoexec.models.qwen3_5` with routed experts and one shared expert.

Source: HF transformers ``Qwen3_5MoeForCausalLM``. Its router always renormalises.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from isoexec.contract import Numerics
from isoexec.models import qwen3, qwen3_5, qwen3_moe
from isoexec.ops import activation, matmul

Tensor = torch.Tensor

final_norm = qwen3_5.final_norm


class SharedExpert(NamedTuple):
    gate_up: Tensor  # [2 F, D]
    down: Tensor  # [D, F]
    gate: Tensor  # [1, D], on every rank


class Qwen35MoELayer(NamedTuple):
    input_norm: Tensor  # [D], as the checkpoint has it
    mixer: qwen3_5.GatedAttention | qwen3_5.GatedDeltaNet
    post_attention_norm: Tensor  # [D]
    mlp: qwen3_moe.SparseMLP
    shared: SharedExpert
    eps: float


def attention_layer(x_TD, residual_TD, layer: Qwen35MoELayer, rope_table, attend, numerics: Numerics, tp=None, ep=None, on_route=None):
    """:func:`isoexec.models.qwen3_5.attention_layer` with :func:`moe_block`."""
    x_TD, residual_TD = qwen3_5.input_norm(x_TD, residual_TD, layer.input_norm, layer.eps)
    x_TD = qwen3_5.attention_block(x_TD, layer.mixer, rope_table, attend, numerics, tp)
    x_TD, residual_TD = qwen3_5.post_attention_norm(x_TD, residual_TD, layer)
    return moe_block(x_TD, layer, numerics, tp, ep, on_route), residual_TD


def gdn_layer(x_TD, residual_TD, layer: Qwen35MoELayer, convolve, mix, numerics: Numerics, tp=None, ep=None, on_route=None):
    """:func:`isoexec.models.qwen3_5.gdn_layer` with :func:`moe_block`."""
    x_TD, residual_TD = qwen3_5.input_norm(x_TD, residual_TD, layer.input_norm, layer.eps)
    x_TD = qwen3_5.gdn_block(x_TD, layer.mixer, convolve, mix, numerics, tp)
    x_TD, residual_TD = qwen3_5.post_attention_norm(x_TD, residual_TD, layer)
    return moe_block(x_TD, layer, numerics, tp, ep, on_route), residual_TD


def moe_block(x_TD: Tensor, layer: Qwen35MoELayer, numerics: Numerics, tp=None, ep=None, on_route=None) -> Tensor:
    """Routed experts plus sigmoid(x w_g) * shared MLP; ``x_TD`` is already normed."""
    gate_T1 = matmul.linear(x_TD, layer.shared.gate)
    value_TD = qwen3.mlp_block(x_TD, layer.shared.gate_up, layer.shared.down, numerics, tp)
    shared_TD = activation.sigmoid_gate(value_TD, gate_T1)
    return qwen3_moe.sparse_mlp_block(x_TD, layer.mlp, numerics, shared_TD=shared_TD, ep=ep, on_route=on_route)
