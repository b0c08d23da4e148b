"""Backward of the ops around the core on the GPU: each function returns ``backward(saved tensors, gradients) -> gradients``.

Gradients need no bit match between runtimes, only determinism: no atomics, a fixed order of every sum.
"""

from __future__ import annotations

import torch

from isoexec.ops.gdn import kernels_edges_backward as kernels
from isoexec.ops.gdn import smooth_edges as smooth
from isoexec.ops.gdn.launch import settings
from isoexec.ops.gdn.triton_launch import configured, cut

TAPS = 4  # of the convolution whose gradient has a kernel


def by_formula(formula):
    """Autograd of a plain torch formula on fp32 copies."""

    def backward(saved, grads):
        with torch.enable_grad():
            leaves = [t.detach().float().requires_grad_() for t in saved]
            out = formula(*leaves)
            outs = [(o, d.float()) for o, d in zip(out if isinstance(out, tuple) else (out,), grads) if d is not None]
            found = torch.autograd.grad([o for o, _ in outs], leaves, [d for _, d in outs], allow_unused=True)
        return tuple(None if d is None else d.to(t.dtype) for d, t in zip(found, saved))

    return backward


def conv1d(plan):
    """Of (x, weight)."""

    def backward(saved, grads):
        x, weight = saved
        if weight.shape[1] != TAPS:
            return by_formula(lambda x, w: smooth.conv1d(x, w, plan))(saved, grads)
        dy = grads[0].contiguous()
        N = cut(x.shape[1], settings("channels_back")["channels"])
        return _channels(x, weight, (dy, dy, dy), plan, 0, x.shape[1] // N, N, N, 0.0, False)

    return backward


def mixer_inputs(plan, H, HV, K, V, eps):
    """Of (x, a, b, weight, A_log, dt_bias)."""

    def backward(saved, grads):
        x, a, b, weight, A_log, dt_bias = saved
        if weight.shape[1] != TAPS:
            return by_formula(lambda *t: smooth.mixer_inputs(*t, plan, H, HV, K, V, eps))(saved, grads)
        shapes = [(x.shape[0], *s) for s in ((H, K), (H, K), (HV, V))]
        heads = [x.new_zeros(s) if d is None else d.contiguous() for d, s in zip(grads, shapes)]
        dx, dweight = _channels(x, weight, heads, plan, H, HV, K, V, eps, True)
        da, db, dA, ddt = gating((a, b, A_log, dt_bias), grads[3:5])
        return dx, da, db, dweight, dA, ddt

    return backward


def _channels(x, weight, heads, plan, H, HV, K, V, eps, norm):
    (T, D), W = x.shape, weight.shape[1]
    ds, dx = (torch.empty(T, D, dtype=x.dtype, device=x.device) for _ in range(2))
    sizes, options = configured("channels_back")
    runs = -(-T // (sizes["rows"] * sizes["steps"]))
    parts = torch.empty(runs, W, D, dtype=torch.float32, device=x.device)
    if T:
        kernels.channels_back_kernel[runs, 2 * H + HV](
            x, weight, *heads, ds, parts, plan.token_table, T, x.stride(0), sizes["steps"], eps, H, HV, K, V, W,
            sizes["rows"], norm, **options,
        )  # fmt: skip
        sizes, options = configured("taps_back")
        R, N = sizes["rows"], cut(D, sizes["channels"])
        kernels.taps_back_kernel[-(-T // R), D // N](ds, weight, dx, plan.token_table, plan.sequence_table, T, D, W, R, N, **options)
    return dx, parts.sum(0).T.to(weight.dtype)


def gating(saved, grads):
    """Of (a, b, A_log, dt_bias): the backward itself."""
    a, b, A_log, dt_bias = saved
    T, HV = a.shape
    dg, dbeta = (torch.zeros(T, HV, dtype=torch.float32, device=a.device) if d is None else d.contiguous() for d in grads)
    da, db = (torch.empty(T, HV, dtype=t.dtype, device=a.device) for t in (a, b))
    sizes, options = configured("gating_back")
    runs = -(-T // sizes["rows"])
    parts = torch.empty(2, runs, HV, dtype=torch.float32, device=a.device)
    if T:
        kernels.gating_back_kernel[runs, HV](
            a, b, A_log, dt_bias, dg, dbeta, da, db, parts, T, a.stride(0), b.stride(0), HV, sizes["rows"], **options
        )
    dA, ddt = parts.sum(1).unbind(0)
    return da, db, dA.to(A_log.dtype), ddt.to(dt_bias.dtype)


def l2norm(eps):
    """Of (x,), [T, heads, K]."""

    def backward(saved, grads):
        (x,) = saved
        T, heads, K = x.shape
        dx, P = torch.empty(x.shape, dtype=x.dtype, device=x.device), 1 << max(K - 1, 1).bit_length()
        sizes, options = configured("l2norm_back")
        R = sizes["rows"]
        if T:
            kernels.l2norm_back_kernel[-(-T * heads // R),](
                x, grads[0].contiguous(), dx, T * heads, heads, x.stride(0), eps, K, P, R, **options
            )
        return (dx,)

    return backward
