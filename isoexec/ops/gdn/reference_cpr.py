"""`cpr`: Gated DeltaNet as a recurrence inside chunks whose boundary states come from the chunk form; the CPU backend.

Boundary states are those of `cpr_wy` (reference.py), at the same chunks. Inside a chunk, from S = the boundary state [V, K] fp32, per
token t, every line rounded to fp32 where it says so and nowhere else:

    S   = S * e^{g_t}
    u_t = (v_t - sum_K(S * k_t)) * beta_t          the fixed row sum
    S   = S + u_t k_t
    o_t = sum_K(S * (q_t * scale))

The running S of an open chunk is part of a sequence's state; when the chunk fills, the boundary state replaces it. So training, which runs
all chunks side by side, and decode, which runs one token, see the same S before every token.
"""

from __future__ import annotations

import torch

from isoexec.ops._core.math import exp
from isoexec.ops._core.rowsum import row_sum
from isoexec.ops.gdn.gradient import Core
from isoexec.ops.gdn.reference import check_plan, check_rows
from isoexec.ops.gdn.reference import run as advance
from isoexec.ops.gdn.state import Plan, RecurrentPool, join_planes


def run(q, k, v, g, beta, plan: Plan, pool: RecurrentPool, slots: list[int], scale: float | None = None) -> torch.Tensor:
    """Packed batch -> o [T, HV, V] fp32 before rounding; resumes and advances the slots in place. As `reference.run`."""
    check_plan("gdn.cpr", plan, q.shape[0], pool, slots)
    check_rows("gdn.cpr", q, k, v, g, beta)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pieces, starts = _boundaries(q, k, v, g, beta, plan, pool, slots, scale)
    if not pieces:
        return torch.empty(v.shape, dtype=torch.float32, device=v.device)
    o, ends = _recur(q, k, v, g, beta, pieces, torch.stack(starts), scale)
    for (n, _, length, start), S in zip(pieces, ends):
        if (start + length) % plan.chunk:  # only the last piece of a sequence ends inside a chunk
            pool.now[slots[n]] = S
    return o


def _boundaries(q, k, v, g, beta, plan, pool, slots, scale):
    """Cut the batch at chunk boundaries: (sequence, first row, length, position) of each piece, and the state before it.

    The pool ends up with the boundary states and open rows after the batch.
    """
    pieces, starts = [], []
    todo = [(n, plan.offsets[n], plan.lengths[n], plan.starts[n]) for n in range(len(plan.lengths)) if plan.lengths[n]]
    while todo:
        now = [(n, row, min(left, plan.chunk - start % plan.chunk), start) for n, row, left, start in todo]
        pieces += now
        starts += [_start(pool, slots[n], start) for n, _, _, start in now]
        rows = torch.cat([torch.arange(row, row + length) for _, row, length, _ in now]).to(v.device)
        cut = Plan([length for _, _, length, _ in now], plan.chunk, [start for *_, start in now])
        advance(*(x[rows] for x in (q, k, v, g, beta)), cut, pool, [slots[n] for n, *_ in now], scale)
        done = zip(todo, now)
        todo = [(n, row + length, left - length, start + length) for (n, row, left, start), (_, _, length, _) in done if left > length]
    return pieces, starts


def _start(pool, slot: int, position: int) -> torch.Tensor:
    if position % pool.chunk:
        return pool.now[slot].clone()
    if position:
        return join_planes(pool.high[slot], pool.low[slot])
    return torch.zeros_like(pool.now[slot])  # a fresh slot's contents are nobody's


def _recur(q, k, v, g, beta, pieces, S, scale):
    """All pieces side by side, token by token: o [T, HV, V]; the state after each piece [P, HV, V, K]."""
    repeat = v.shape[1] // q.shape[1]
    q, k = ((x.float() * s).repeat_interleave(repeat, 1) for x, s in ((q, scale), (k, 1.0)))
    first, length = (torch.tensor([p[i] for p in pieces], device=v.device) for i in (1, 2))
    o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for t in range(int(length.max())):
        live = (length > t).nonzero()[:, 0]
        row = first[live] + t
        k_t = k[row][:, :, None, :]
        state = S[live] * exp(g[row])[..., None, None]
        u = (v[row].float() - row_sum(state * k_t)) * beta[row][..., None]
        S[live] = state = state + u[..., None] * k_t
        o[row] = row_sum(state * q[row][:, :, None, :])
    return o, S


class _Train(torch.autograd.Function):
    """Forward: :func:`run` on a pool of its own. Backward: that of `cpr_wy`, since both are the same function."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, plan, scale):
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.plan, ctx.scale = plan, scale
        (H, K), (HV, V), N = q.shape[1:], v.shape[1:], len(plan.lengths)
        pool = RecurrentPool.empty(N, H, HV, K, V, plan.chunk, v.device)
        return run(q, k, v, g, beta, plan, pool, list(range(N)), scale)

    backward = staticmethod(Core.backward)


def train(q, k, v, g, beta, plan, scale=None, out_dtype=torch.bfloat16):
    return _Train.apply(q, k, v, g, beta, plan, q.shape[-1] ** -0.5 if scale is None else scale).to(out_dtype)


def prefill(q, k, v, g, beta, plan, pool, slots, scale=None, out_dtype=torch.bfloat16):
    return run(q, k, v, g, beta, plan, pool, slots.tolist(), scale).to(out_dtype)


def decode(q, k, v, g, beta, pool, slots, positions, scale=None, null_slot=-1, out_dtype=torch.bfloat16):
    o = torch.zeros(v.shape, dtype=torch.float32)
    owner = slots.tolist()
    live = [j for j, s in enumerate(owner) if s >= 0 and s != null_slot]
    if live:
        plan = Plan([1] * len(live), pool.chunk, positions[live].tolist())
        o[live] = run(*(x[live] for x in (q, k, v, g, beta)), plan, pool, [owner[j] for j in live], scale)
    return o.to(out_dtype)
