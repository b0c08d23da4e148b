"""What surrounds the core, CPU backend: causal convolution, gating, l2norm (docs/schedule.md, rows GDN conv, gating, l2norm).

These are differentiable torch code: autograd through them is the trainer's backward on the CPU.
"""

from __future__ import annotations

import torch

from isoexec.ops._core.math import exp, rsqrt, sigmoid, silu, softplus
from isoexec.ops._core.rowsum import row_sum


def conv1d(x, weight, plan, window=None):
    """Causal depthwise convolution and silu over a packed batch; `isoexec.ops.gdn.conv1d` documents the arguments."""
    taps = weight.shape[1]
    before = x.new_zeros(len(plan.lengths), taps - 1, x.shape[1]) if window is None else window
    pieces, tails = [], []
    for n, (first, length) in enumerate(zip(plan.offsets, plan.lengths)):
        # A sequence that starts here has +0.0 before it, whatever its slot holds.
        head = before[n] if plan.starts[n] else torch.zeros_like(before[n])
        rows = torch.cat([head, x[first : first + length]])
        pieces.append(_taps(rows, weight))
        tails.append(rows[rows.shape[0] - (taps - 1) :])
    y = torch.cat(pieces) if pieces else x
    return y, torch.stack(tails) if tails else before


def _taps(rows, weight):
    """[L + W - 1, D] -> silu of [L, D]: products added oldest first, one rounding at the end."""
    taps = weight.shape[1]
    length = rows.shape[0] - taps + 1
    w = weight.float()
    total = rows[:length].float() * w[:, 0]
    for j in range(1, taps):
        total = total + rows[j : j + length].float() * w[:, j]
    return silu(total).to(rows.dtype)


def conv1d_step(x, weight, window, slots, null_slot=-1):
    """One token per lane, `window` [slots, W-1, D] advanced in place; inert lanes give +0.0."""
    y = torch.zeros_like(x)
    live = [j for j, s in enumerate(slots.tolist()) if s >= 0 and s != null_slot]
    if live:
        at = slots[live].long()
        rows = torch.cat([window[at], x[live][:, None]], 1)  # [N, W, D]
        y[live] = torch.stack([_taps(r, weight)[0] for r in rows])
        window[at] = rows[:, 1:]
    return y


def gating(a, b, A_log, dt_bias):
    """g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), fp32."""
    # 0 - x, not x * -1.0: nothing here may depend on the sign of a zero.
    g = 0.0 - exp(A_log) * softplus(a.float() + dt_bias)
    return g, sigmoid(b.float())


def l2norm(x, eps=1e-6):
    """x rsqrt(sum x^2 + eps) over the last dimension in fp32, one rounding."""
    x32 = x.float()
    return (x32 * rsqrt(row_sum(x32 * x32) + eps)[..., None]).to(x.dtype)


def mixer_inputs(x, a, b, weight, A_log, dt_bias, plan, H, HV, K, V, window=None, eps=1e-6):
    y, window = conv1d(x, weight, plan, window)
    return *heads(y, H, K, V, eps), *gating(a, b, A_log, dt_bias), window


def mixer_step_inputs(x, a, b, weight, A_log, dt_bias, window, slots, H, HV, K, V, null_slot=-1, eps=1e-6):
    return *heads(conv1d_step(x, weight, window, slots, null_slot), H, K, V, eps), *gating(a, b, A_log, dt_bias)


def heads(y, H, K, V, eps):
    q, k, v = (t.unflatten(-1, (-1, d)) for t, d in zip(y.split((H * K, H * K, y.shape[1] - 2 * H * K), -1), (K, K, V)))
    return l2norm(q, eps), l2norm(k, eps), v.contiguous()
