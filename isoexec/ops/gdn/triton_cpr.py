"""`cpr` on the GPU: boundary states by the launches of `cpr_wy`, then the recurrence inside all chunks side by side."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops.gdn import kernels_cpr as kernels
from isoexec.ops.gdn import triton_core as core
from isoexec.ops.gdn import triton_decode, triton_gradient
from isoexec.ops.gdn.triton_launch import configured


def _recur(q, k, v, g, beta, plan, states, scale, out_dtype, pool=None, slots=None):
    (H, K), (HV, V), C = q.shape[1:], v.shape[1:], plan.chunk
    o = torch.empty(v.shape, dtype=out_dtype, device=v.device)
    constants, options = configured("recur", C, V)
    now = pool.now if pool else states
    if plan.chunks:
        kernels.recur_kernel[V // constants["BV"], plan.chunks * HV](
            q, k, v, g, beta, o, states, now, plan.sequence_table if slots is None else slots, plan.sequence_table, plan.chunk_table, scale,
            now.stride(0), H, HV, K, V, C, K.bit_length() - 1, constants["BV"], pool is not None, **options,
        )  # fmt: skip
    return o


def _states(plan, v, K):
    return torch.empty(plan.chunks, *v.shape[1:], K, dtype=torch.float32, device=v.device)


class Core(torch.autograd.Function):
    """Trainer forward of `cpr`; its backward is that of `cpr_wy`, since both are the same function."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, plan, scale, out_dtype):
        ws = core.prepass(q, k, g, beta, plan, scale)
        save, states = any(ctx.needs_input_grad), _states(plan, v, q.shape[-1])
        _, u, h = core.chain(q, k, v, plan, ws, torch.bfloat16, save=save, states=states)
        if save:
            ctx.save_for_backward(q, k, v, g, beta, u, h, ws.b, ws.E, ws.T, ws.M)
            ctx.plan, ctx.scale = plan, scale
        return _recur(q, k, v, g, beta, plan, states, scale, out_dtype)

    backward = staticmethod(triton_gradient.Core.backward)


def train(q, k, v, g, beta, plan, scale=None, out_dtype=torch.bfloat16):
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    core.check(q, k, v, g, beta, plan.chunk)
    if any(plan.starts):
        raise ContractError("op gdn.cpr: the trainer runs whole sequences; this plan resumes some: use cpr_prefill")
    return Core.apply(q, k, v, g, beta, plan, q.shape[-1] ** -0.5 if scale is None else scale, out_dtype)


def prefill(q, k, v, g, beta, plan, pool, slots, scale=None, out_dtype=torch.bfloat16):
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    scale, states = q.shape[-1] ** -0.5 if scale is None else scale, _states(plan, v, q.shape[-1])
    core.prefill(q, k, v, g, beta, plan, pool, slots, scale, states=states)
    return _recur(q, k, v, g, beta, plan, states, scale, out_dtype, pool, slots)


def decode(q, k, v, g, beta, pool, slots, positions, scale=None, null_slot=-1, out_dtype=torch.bfloat16):
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    (B, H, K), (HV, V), C = q.shape, v.shape[1:], pool.chunk
    scale = K**-0.5 if scale is None else scale
    triton_decode.decode(q, k, v, g, beta, pool, slots, positions, scale, null_slot)  # advances the boundary state and the open rows
    o = torch.empty(v.shape, dtype=out_dtype, device=v.device)
    constants, options = configured("recur_step", C, V)
    kernels.recur_step_kernel[V // constants["BV"], B * HV](
        q, k, v, g, beta, o, pool.high, pool.low, pool.now, slots, positions, scale, null_slot, pool.high.stride(0), pool.now.stride(0),
        H, HV, K, V, C, K.bit_length() - 1, constants["BV"], **options,
    )  # fmt: skip
    return o
