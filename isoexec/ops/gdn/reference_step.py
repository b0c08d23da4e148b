"""Decode steps that hold more than the core, CPU backend: the ops apart, one after another. A module of its own: the core needs no norm."""

from __future__ import annotations

import torch

from isoexec.ops.gdn import reference_conv
from isoexec.ops.gdn.cpu import decode
from isoexec.ops.norm.reference import gated_rms_norm


def step(y, a, b, A_log, dt_bias, pool, slots, positions, H, HV, K, V, scale=None, null_slot=-1, eps=1e-6, out_dtype=torch.bfloat16):
    x = *reference_conv.heads(y, H, K, V, eps), *reference_conv.gating(a, b, A_log, dt_bias)
    return decode(*x, pool, slots, positions, scale, null_slot, out_dtype)


def mixer_step(
    x, a, b, z, weight, A_log, dt_bias, norm_weight, window, pool, slots, positions, H, HV, K, V, scale=None, null_slot=-1, eps=1e-6,
    norm_eps=1e-6,
):  # fmt: skip
    y = reference_conv.conv1d_step(x, weight, window, slots, null_slot)
    o = step(y, a, b, A_log, dt_bias, pool, slots, positions, H, HV, K, V, scale, null_slot, eps)
    live = (slots >= 0) & (slots != null_slot)
    return torch.where(live[:, None, None], gated_rms_norm(o, z, norm_weight, norm_eps), 0.0)
