"""The GPU implementations of the ops around the core: launches around kernels_edges.py."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops.gdn import kernels_edges as kernels
from isoexec.ops.gdn import triton_edges_gradient as gradient
from isoexec.ops.gdn.triton_launch import configured, cut


def _power(name: str, value: int) -> int:
    if value & (value - 1) or value < 16:
        raise ContractError(f"op {name}: channels per program {value} must be a power of two >= 16 on a GPU")
    return value.bit_length() - 1


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """x itself when only its first stride is unusual, else a contiguous copy."""
    inner = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:])):
        if stride != inner and size != 1:
            return x.contiguous()
        inner *= size
    return x


class _Differentiable(torch.autograd.Function):
    """forward(*tensors) by ``launch``; backward by ``back(tensors, gradients)``."""

    @staticmethod
    def forward(ctx, launch, back, *tensors):
        ctx.back = back
        ctx.save_for_backward(*tensors)
        return launch(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *ctx.back(ctx.saved_tensors, grads)


def _window(x, plan, window, taps):
    out = torch.empty(len(plan.lengths), taps - 1, x.shape[1], dtype=x.dtype, device=x.device)
    sizes, options = configured("window")
    N = cut(x.shape[1], sizes["channels"])
    if len(plan.lengths):
        kernels.window_kernel[len(plan.lengths), x.shape[1] // N](
            x, x if window is None else window, out, plan.sequence_table, x.stride(0), x.shape[1], taps, N, window is not None, **options
        )
    return out


def conv1d(x, weight, plan, window=None):
    x, weight = _rows_of(x), weight.contiguous()
    (T, D), taps = x.shape, weight.shape[1]
    sizes, options = configured("conv")
    R, N, ahead = sizes["rows"], cut(D, sizes["channels"]), sizes["ahead"]
    old = None if window is None else window.contiguous()

    def launch(x, weight):
        y = torch.empty(T, D, dtype=x.dtype, device=x.device)
        if T:
            kernels.conv_kernel[-(-T // R), D // N](
                x, weight, x if old is None else old, y, plan.token_table, plan.sequence_table, T, x.stride(0), D, taps, R, N, ahead,
                old is not None, **options,
            )  # fmt: skip
        return y

    y = _Differentiable.apply(launch, gradient.conv1d(plan), x, weight)
    return y, _window(x.detach(), plan, old, taps)


def conv1d_step(x, weight, window, slots, null_slot=-1):
    x, (B, D) = _rows_of(x), x.shape
    sizes, options = configured("conv_step")
    N, y = cut(D, sizes["channels"]), torch.empty(B, D, dtype=x.dtype, device=x.device)
    kernels.conv_step_kernel[B, D // N](
        x, weight, window, y, slots, null_slot, x.stride(0), window.stride(0), D, weight.shape[1], N, **options
    )
    return y


def gating(a, b, A_log, dt_bias):
    a, b = _rows_of(a), _rows_of(b)
    sizes, options = configured("gating")
    R = sizes["rows"]

    def launch(a, b, A_log, dt_bias):
        T, HV = a.shape
        g, beta = (torch.empty(T, HV, dtype=torch.float32, device=a.device) for _ in range(2))
        if T:
            P = 1 << (HV - 1).bit_length()
            kernels.gating_kernel[-(-T // R),](a, b, A_log, dt_bias, g, beta, T, a.stride(0), b.stride(0), HV, P, R, **options)
        return g, beta

    return _Differentiable.apply(launch, gradient.gating, a, b, A_log, dt_bias)


def l2norm(x, eps=1e-6):
    tokens = _rows_of(x.reshape(-1, 1, x.shape[-1]) if x.dim() != 3 else x)
    sizes, options = configured("l2norm")
    R = sizes["rows"]

    def launch(x):
        T, heads, K = x.shape
        y, LOGP = torch.empty(T, heads, K, dtype=x.dtype, device=x.device), max(K - 1, 1).bit_length()
        if T:
            kernels.l2norm_kernel[-(-T * heads // R),](x, y, T * heads, heads, x.stride(0), eps, K, 1 << LOGP, LOGP, R, **options)
        return y

    return _Differentiable.apply(launch, gradient.l2norm(eps), tokens).reshape(x.shape)


def mixer_inputs(x, a, b, weight, A_log, dt_bias, plan, H, HV, K, V, window=None, eps=1e-6):
    x, a, b, weight = _rows_of(x), _rows_of(a), _rows_of(b), weight.contiguous()
    LOGK, taps, T = _power("gdn.mixer_inputs", K), weight.shape[1], x.shape[0]
    _power("gdn.mixer_inputs", V)
    old = None if window is None else window.contiguous()
    sizes, options = configured("inputs")
    R = sizes["rows"]

    def launch(x, a, b, weight, A_log, dt_bias):
        q, k, v, g, beta = _outputs(T, H, HV, K, V, x)
        if T:
            kernels.inputs_kernel[-(-T // R), 2 * H + HV + 1](
                x, a, b, weight, x if old is None else old, A_log, dt_bias, q, k, v, g, beta, plan.token_table, plan.sequence_table, T,
                x.stride(0), a.stride(0), b.stride(0), eps, H, HV, K, V, taps, R, LOGK, old is not None, **options,
            )  # fmt: skip
        return q, k, v, g, beta

    out = _Differentiable.apply(launch, gradient.mixer_inputs(plan, H, HV, K, V, eps), x, a, b, weight, A_log, dt_bias)
    return *out, _window(x.detach(), plan, old, taps)


def mixer_step_inputs(x, a, b, weight, A_log, dt_bias, window, slots, H, HV, K, V, null_slot=-1, eps=1e-6):
    x, a, b = _rows_of(x), _rows_of(a), _rows_of(b)
    LOGK = _power("gdn.mixer_step_inputs", K)
    _power("gdn.mixer_step_inputs", V)
    out, (_, options) = _outputs(x.shape[0], H, HV, K, V, x), configured("step_inputs")
    kernels.step_inputs_kernel[x.shape[0], 2 * H + HV](
        x, a, b, weight, window, A_log, dt_bias, *out, slots, null_slot, x.stride(0), a.stride(0), b.stride(0), window.stride(0), eps, H,
        HV, K, V, weight.shape[1], LOGK, **options,
    )  # fmt: skip
    return out


def _outputs(T, H, HV, K, V, like):
    heads = [torch.empty(T, h, d, dtype=torch.bfloat16, device=like.device) for h, d in ((H, K), (H, K), (HV, V))]
    return *heads, *(torch.empty(T, HV, dtype=torch.float32, device=like.device) for _ in range(2))
