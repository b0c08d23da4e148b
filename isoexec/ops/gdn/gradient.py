"""Gradients of the core on the CPU: autograd of the unrounded chunk form, recomputed.

Gradients need no bit match between runtimes, only the same bits from run to run in one layout, so this is plain torch: the
formula of reference.py without its bf16 roundings (a rounding's derivative is taken as one).
"""

from __future__ import annotations

import torch

from isoexec.ops.gdn.reference import run


def smooth(q, k, v, g, beta, plan, scale: float) -> torch.Tensor:
    """The delta rule of one packed batch in the inputs' dtype (fp32 or fp64), differentiable: o [T, HV, V]."""
    repeat = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    outputs = []
    for first, length in zip(plan.offsets, plan.lengths):
        S = v.new_zeros(v.shape[1], v.shape[2], q.shape[2])
        for start in range(first, first + length, plan.chunk):
            rows = slice(start, min(start + plan.chunk, first + length))
            q_c, k_c, v_c = (x[rows].transpose(0, 1) for x in (q, k, v))  # [HV, C, D]
            G, b = g[rows].cumsum(0).T, beta[rows].T
            # tril before exp: above the diagonal the exponent is positive and may overflow.
            decay = (G[:, :, None] - G[:, None, :]).tril().exp().tril()
            A = (k_c @ k_c.mT * decay * b[:, :, None]).tril(-1)
            rhs = (v_c - G.exp()[..., None] * (k_c @ S.mT)) * b[..., None]
            eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
            u = torch.linalg.solve_triangular(eye + A, rhs, upper=False, unitriangular=True)
            o = scale * (G.exp()[..., None] * (q_c @ S.mT) + (q_c @ k_c.mT * decay) @ u)
            outputs.append(o.transpose(0, 1))
            left = (G[:, -1:] - G).exp()[..., None]
            S = G[:, -1, None, None].exp() * S + (u * left).mT @ k_c
    return torch.cat(outputs) if outputs else v


class Core(torch.autograd.Function):
    """Forward: the reference. Backward: autograd of :func:`smooth` in fp32."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, plan, scale):
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.plan, ctx.scale = plan, scale
        return run(q, k, v, g, beta, plan, scale=scale)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            inputs = [x.detach().float().requires_grad_() for x in ctx.saved_tensors]
            o = smooth(*inputs, ctx.plan, ctx.scale)
            # Not autograd.grad(o, inputs, grad): with gradients given, torch imports its symbolic shapes, which takes seconds.
            grads = torch.autograd.grad((o * grad.float()).sum(), inputs)
        return *(d.to(x.dtype) for d, x in zip(grads, ctx.saved_tensors)), None, None
