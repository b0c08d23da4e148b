"""Decode of `cpr_wy` on the GPU: launches around kernels_decode.py."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops.gdn import kernels_decode as kernels
from isoexec.ops.gdn.launch import settings
from isoexec.ops.gdn.triton_core import check, check_pool
from isoexec.ops.gdn.triton_launch import configured, limit, split


def decode(q, k, v, g, beta, pool, slots, positions, scale=None, null_slot=-1, out_dtype=torch.bfloat16, out=None, entry=None):
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    check(q, k, v, g, beta, pool.chunk)
    check_pool(pool, pool.chunk, q, v)
    o = torch.empty(v.shape, dtype=out_dtype, device=v.device) if out is None else out
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    _launch(q, k, v, g, beta, pool, slots, positions, scale, null_slot, o, entry=entry)
    return o


def step(
    y, a, b, A_log, dt_bias, pool, slots, positions, H, HV, K, V, scale=None, null_slot=-1, eps=1e-6, out_dtype=torch.bfloat16, out=None
):  # fmt: skip
    q, k, v = _heads(y, H, HV, K, V, pool)
    o = torch.empty(v.shape, dtype=out_dtype, device=y.device) if out is None else out
    _launch(q, k, v, a, b, pool, slots, positions, K**-0.5 if scale is None else scale, null_slot, o, raw=(A_log, dt_bias, eps))
    return o


def mixer_step(
    x, a, b, z, weight, A_log, dt_bias, norm_weight, window, pool, slots, positions, H, HV, K, V, scale=None, null_slot=-1, eps=1e-6,
    norm_eps=1e-6, out=None,
):  # fmt: skip
    q, k, v = _heads(x, H, HV, K, V, pool)
    o = torch.empty(v.shape, dtype=x.dtype, device=x.device) if out is None else out
    scale = K**-0.5 if scale is None else scale
    gated, conv = (_heads_inner(z), norm_weight, norm_eps), (weight.contiguous(), window)
    _launch(q, k, v, a, b, pool, slots, positions, scale, null_slot, o, raw=(A_log, dt_bias, eps), conv=conv, gated=gated)
    return o


def _heads(x, H, HV, K, V, pool):
    """Channels [B, 2 H K + HV V] -> views q, k [B, H, K], v [B, HV, V]; no copy where channels are contiguous."""
    if x.shape[1] != 2 * H * K + HV * V or x.dtype != torch.bfloat16:
        raise ContractError(f"op gdn.mixer_step: expected channels [B, {2 * H * K + HV * V}] bf16, found {tuple(x.shape)} {x.dtype}")
    x = x if x.stride(1) == 1 else x.contiguous()
    q, k, v = (t.unflatten(-1, (-1, d)) for t, d in zip(x.split((H * K, H * K, HV * V), -1), (K, K, V)))
    check_pool(pool, pool.chunk, q, v)
    return q, k, v


def _heads_inner(z):
    return z if z.stride(2) == 1 and z.stride(1) == z.shape[2] else z.contiguous()


def _launch(q, k, v, g, beta, pool, slots, positions, scale, null_slot, o, raw=None, conv=None, gated=None, entry=None):
    """One token per lane. raw: (A_log, dt_bias, eps), q and k not normalised and g, beta the projections; conv: (weight, window), q, k, v
    not convolved; gated: (z, weight, eps) of the norm. One launch or two, whatever the tiles: the same bits."""
    (B, H, K), (HV, V), C = q.shape, v.shape[1:], pool.chunk
    two = conv is not None or gated is not None
    if entry is None:
        name = "decode_gated" if gated else "decode_main" if two or B * HV > limit("one_launch") else "decode"
        entry = settings(name, C, V)
    two = dict(entry).pop("two_launches", 0) or two
    constants, options = split({name: value for name, value in entry.items() if name != "two_launches"})
    BV, (LOGC, LOGK, LOGV) = constants["BV"], (n.bit_length() - 1 for n in (C, K, V))
    if gated and BV != V:
        raise ContractError(f"op gdn.mixer_step: the launch table's BV is {BV}, but the norm needs whole heads of {V} in one program")
    A_log, dt_bias, eps = (g, g, 0.0) if raw is None else raw
    state = (pool.high, pool.low, pool.k, pool.rhs, pool.gates)
    S_slot, k_slot, rhs_slot, gates_slot = (x.stride(0) for x in (pool.high, pool.k, pool.rhs, pool.gates))
    rows = (q.stride(0), v.stride(0), g.stride(0), beta.stride(0))
    grid = (V // BV, B * HV)
    if not two:
        kernels.decode_kernel[grid](
            q, k, v, g, beta, A_log, dt_bias, o, *state, slots, positions, scale, eps, null_slot, *rows, S_slot, k_slot, rhs_slot,
            gates_slot, H, HV, K, V, C, LOGC, LOGK, BV, raw is not None, **options,
        )  # fmt: skip
        return
    T, M = (torch.empty(B, HV, C, C, dtype=torch.bfloat16, device=v.device) for _ in range(2))
    qn, kn = (torch.empty(B, H, K, dtype=q.dtype, device=q.device) for _ in range(2)) if raw else (q, k)
    vn = torch.empty(B, HV, V, dtype=v.dtype, device=v.device) if conv else v
    weight, window = conv if conv else (q, q)
    _, pre = configured("decode_pre", C)
    kernels.decode_pre_kernel[B, H](
        q, k, v, g, beta, A_log, dt_bias, weight, window, qn, kn, vn, pool.k, pool.gates, slots, positions, T, M, scale, eps, null_slot,
        rows[0], *rows[2:], window.stride(0), k_slot, gates_slot, H, HV, K, V, C, LOGC, LOGK, weight.shape[1], raw is not None,
        conv is not None, **pre,
    )  # fmt: skip
    z, norm_weight, norm_eps = gated if gated else (o, o, 0.0)
    kernels.decode_main_kernel[grid](
        qn, kn, vn, o, z, norm_weight, *state, slots, positions, T, M, scale, norm_eps, null_slot, vn.stride(0), z.stride(0), S_slot,
        k_slot, rhs_slot, gates_slot, H, HV, K, V, C, LOGV, BV, gated is not None, **options,
    )  # fmt: skip
