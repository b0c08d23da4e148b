"""Backward of `cpr_wy` on the GPU: launches around kernels_backward.py. Deterministic: no atomics, fixed order of every sum."""

from __future__ import annotations

import torch

from isoexec.ops.gdn import kernels_backward as kernels
from isoexec.ops.gdn import triton_core as core
from isoexec.ops.gdn.state import BLOCK
from isoexec.ops.gdn.triton_launch import configured, limit


class Core(torch.autograd.Function):
    """Trainer forward with its backward. When a gradient is wanted the forward keeps u [T, HV, V] and the state of every BLOCK
    tokens, both bf16."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, plan, scale, out_dtype):
        ws = core.prepass(q, k, g, beta, plan, scale)
        save = any(ctx.needs_input_grad)
        o, u, h = core.chain(q, k, v, plan, ws, out_dtype, save=save)
        if save:
            ctx.save_for_backward(q, k, v, g, beta, u, h, ws.b, ws.E, ws.T, ws.M)
            ctx.plan, ctx.scale = plan, scale
        return o

    @staticmethod
    def backward(ctx, grad):
        return *backward(ctx.saved_tensors, ctx.plan, ctx.scale, grad), None, None, None


def backward(saved, plan, scale, grad):
    """-> dq, dk, dv in their inputs' bf16, dg, dbeta fp32."""
    q, k, v, g, beta, u, h, b_ws, E, T, M = saved
    (tokens, H, K), (HV, V), C = q.shape, v.shape[1:], plan.chunk
    do = grad.to(torch.bfloat16).contiguous()
    first_block, table = plan.blocks
    drhs, dh = torch.empty_like(v), torch.empty_like(h)
    dq, dk, dv, dg, db = (torch.empty_like(x) for x in (q, k, v, g, beta))
    narrow = len(plan.lengths) * HV <= limit("narrow")
    constants, options = configured("back_chain_narrow" if narrow else "back_chain", C, V)
    BV = constants["BV"]
    if not tokens:
        return dq, dk, dv, dg, db
    kernels.back_chain_kernel[V // BV, len(plan.lengths) * HV](
        q, k, do, drhs, dh, plan.sequence_table, first_block, b_ws, E, T, M, H, HV, K, V, C, BV, BLOCK, constants["stages"],
        **options,
    )  # fmt: skip
    blocks = table.shape[0]
    score, solve = (torch.empty(blocks, HV, BLOCK, BLOCK, dtype=torch.bfloat16, device=v.device) for _ in range(2))
    constants, options = configured("back_inner", C, V)
    db_v = torch.empty_like(beta)
    kernels.back_inner_kernel[blocks, HV](
        v, g, beta, do, u, drhs, dv, score, solve, db_v, table, scale, HV, V, BLOCK, constants["BV"], constants["stages"], **options
    )
    group = HV // H
    constants, options = configured("back_query", C, V, K)
    BK, BV = constants["BK"], constants["BV"]
    parts = torch.empty(2, K // BK, tokens, HV, dtype=torch.float32, device=v.device)
    kernels.back_query_kernel[K // BK, blocks, H](
        q, k, g, do, h, score, dq, parts[0], table, scale, tokens, group, V // BV, H, HV, K, V, BLOCK, BK, BV, constants["stages"],
        **options,
    )  # fmt: skip
    constants, options = configured("back_key", C, V)
    BV = constants["BV"]
    kernels.back_key_kernel[K // BK, blocks, H](
        q, k, g, beta, u, drhs, h, dh, score, solve, dk, parts[0], parts[1], table, tokens, group, V // BV, H, HV, K, V, BLOCK, BK, BV,
        constants["stages"], **options,
    )  # fmt: skip
    _, options = configured("back_gate", C)
    kernels.back_gate_kernel[blocks, HV](parts[0], parts[1], db_v, dg, db, table, tokens, HV, BLOCK, K // BK, **options)
    return dq, dk, dv, dg, db
