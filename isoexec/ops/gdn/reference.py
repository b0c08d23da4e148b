"""`cpr_wy`: Gated DeltaNet in chunk form, evaluated row by row; the CPU backend and the formula of every other one.

Per value head, S [V, K] the fp32 state at the chunk's boundary, rows t = 0 .. C-1 of the chunk (docs/schedule.md, GDN core):

    G_t   = G_{t-1} + g_t                                       one sequential fp32 sum
    A_ts  = beta_t (k_t . k_s) e^{G_t - G_s}                    s < t
    T     = bf16((I + A)^-1)                                    block doubling
    rhs_t = bf16(beta_t (v_t - e^{G_t} bf16(S) k_t))
    u_t   = sum_{s<=t} T_ts rhs_s
    o_t   = scale e^{G_t} bf16(S) q_t + sum_{s<=t} bf16(scale (q_t . k_s) e^{G_t - G_s}) bf16(u_s)
    S'    = e^{G_C} S + sum_s bf16(e^{G_C - G_s} u_s) k_s

Row t reads rows s <= t only: rows that are not there yet are zero by selection, so prefill in any split and decode are this
same function at the same tile positions. bf16(S) is the high plane of `state.split_planes`.
"""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops._core.math import exp
from isoexec.ops.gdn.state import Plan, StatePool, join_planes, split_planes


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def solve(A_BCC: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 of strictly lower triangular ``A``, by doubling the size of the inverted diagonal blocks.

    Not a Neumann series: its powers blow up for correlated keys. Row t is made of rows <= t of A.
    """
    C = A_BCC.shape[-1]
    i = torch.arange(C, device=A_BCC.device)
    row, col = i[:, None], i[None, :]
    T = torch.where((row // 2 == col // 2) & (row > col), -A_BCC, (row == col).to(A_BCC.dtype))
    size = 2
    while size < C:
        below = ((row // size) % 2 == 1) & (col // size == row // size - 1)
        X = torch.bmm(torch.where(below, A_BCC, 0.0), T)
        T = torch.where(below, -torch.bmm(T, X), T)
        size *= 2
    return T


def chunk(S, q, k, v, G, beta, rhs, known, scale):
    """One chunk of B (sequence, head) pairs.

    Args: S [B, V, K]; q, k [B, C, K]; v [B, C, V]; G, beta [B, C]; rhs [B, C, V], used where ``known`` [B, C] (rows that an
        earlier call computed). All fp32, the bf16 ones holding bf16 values. Every product has one fixed shape per (C, K, V),
        so that its bits do not depend on the batch.
    Returns: o [B, C, V] fp32 before rounding; rhs [B, C, V]; S' [B, V, K], meaningful when all C rows are real; whether a row's
        values leave fp32 [B, C], though S does not.
    """
    C = k.shape[1]
    i = torch.arange(C, device=k.device)
    low = i[:, None] > i[None, :]
    decay = exp(torch.where(low, G[:, :, None] - G[:, None, :], 0.0))
    A = torch.where(low, (torch.bmm(k, k.mT) * decay) * beta[:, :, None], 0.0)
    T = _bf16(solve(A))
    M = torch.where(low | (i[:, None] == i[None, :]), (torch.bmm(q, k.mT) * decay) * scale, 0.0)
    S_high = split_planes(S)[0].float()
    eG = exp(G)
    fresh = _bf16((v - torch.bmm(S_high, k.mT).mT * eG[:, :, None]) * beta[:, :, None])
    rhs = torch.where(known[:, :, None], rhs, fresh)
    u = torch.bmm(rhs.mT, T.mT)  # [B, V, C]
    o = torch.bmm(S_high, q.mT) * (eG * scale)[:, None, :] + torch.bmm(_bf16(u), _bf16(M).mT)
    last = G[:, -1:]
    S_next = S * exp(last)[:, :, None] + torch.bmm(_bf16(u * exp(last - G)[:, None, :]), k)
    beyond = ~torch.isfinite(_bf16(u)).all(1) & torch.isfinite(S_high).flatten(1).all(1)[:, None]
    return o.mT, rhs, S_next, beyond


def cumulate(g: torch.Tensor, G: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """Cumulative decay over the last dimension: G where ``known``, else the previous entry + g."""
    columns, carry = [], torch.zeros_like(g[..., 0])
    for t in range(g.shape[-1]):
        carry = torch.where(known[..., t], G[..., t], carry + g[..., t])
        columns.append(carry)
    return torch.stack(columns, -1)


def run(q, k, v, g, beta, plan: Plan, pool: StatePool | None = None, slots=None, scale: float | None = None) -> torch.Tensor:
    """Packed batch -> o [T, HV, V] fp32 before rounding; with a pool, resumes and advances the slots in place.

    q, k [T, H, K] bf16 (normalised), v [T, HV, V] bf16, g, beta [T, HV] fp32; slots: one int per sequence.
    """
    (H, K), (HV, V), C = q.shape[1:], v.shape[1:], plan.chunk
    check_plan("gdn.cpr_wy", plan, q.shape[0], pool, slots)
    check_rows("gdn.cpr_wy", q, k, v, g, beta)
    scale = K**-0.5 if scale is None else scale
    o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    S = {}  # sequence -> [HV, V, K]
    most = max((-(-(s % C + n) // C) for s, n in zip(plan.starts, plan.lengths)), default=0)
    for c in range(most):
        live = [n for n, L in enumerate(plan.lengths) if L and c * C < plan.starts[n] % C + L]
        row, real, known = _rows(plan, live, c, v.device)
        take = lambda x: torch.where(real[:, :, None, None], x[row].float(), 0.0).transpose(1, 2)  # [N, heads, C, D]
        q_t, k_t, v_t = take(q), take(k), take(v)
        g_t, b_t = (take(x[..., None])[..., 0] for x in (g, beta))
        G_t, rhs_t = torch.zeros_like(g_t), torch.zeros_like(v_t)
        if pool is not None and bool(known.any()):
            at = torch.tensor([slots[n] for n in live], device=v.device)
            mark = known[:, None, :]
            k_t = torch.where(mark[..., None], pool.k[at].float(), k_t)
            rhs_t = torch.where(mark[..., None], pool.rhs[at].float(), rhs_t)
            G_t, b_t = (torch.where(mark, old, new) for old, new in zip(pool.gates[at].unbind(2), (G_t, b_t)))
        G_t = cumulate(g_t, G_t, known[:, None, :].expand_as(g_t))
        S_b = torch.stack([S.get(n, _boundary(plan, pool, slots, n, HV, V, K, v)) for n in live])
        group = lambda x: x.repeat_interleave(HV // H, 1).flatten(0, 1)
        o_t, rhs_t, S_next, beyond = chunk(
            S_b.flatten(0, 1), group(q_t), group(k_t), v_t.flatten(0, 1), G_t.flatten(0, 1), b_t.flatten(0, 1),
            rhs_t.flatten(0, 1), known.repeat_interleave(HV, 0), scale,
        )  # fmt: skip
        refuse_overflow(beyond.unflatten(0, (-1, HV)).any(1) & real, v, g)
        o[row[real]] = o_t.unflatten(0, (-1, HV)).transpose(1, 2)[real]
        for j, n in enumerate(live):
            held = min(C, plan.starts[n] % C + plan.lengths[n] - c * C)
            if held == C:
                S[n] = S_next.unflatten(0, (-1, HV))[j]
            elif pool is not None:
                fields = (pool.k, k_t[j]), (pool.rhs, rhs_t.unflatten(0, (-1, HV))[j])
                for store, rows in fields:
                    store[slots[n], :, :held] = rows[:, :held].to(torch.bfloat16)
                pool.gates[slots[n], :, :, :held] = torch.stack([G_t[j], b_t[j]], 1)[..., :held]
    if pool is not None:
        for n, state in S.items():
            pool.high[slots[n]], pool.low[slots[n]] = split_planes(state)
    return o


def _rows(plan: Plan, live, c: int, device):
    """Input row of each tile position [N, C], whether it is one of this call's rows, whether an earlier call had it."""
    i = torch.arange(plan.chunk, device=device)
    t0 = torch.tensor([plan.starts[n] % plan.chunk for n in live], device=device)[:, None]
    length = torch.tensor([plan.lengths[n] for n in live], device=device)[:, None]
    first = torch.tensor([plan.offsets[n] for n in live], device=device)[:, None]
    p = c * plan.chunk - t0 + i
    real = (p >= 0) & (p < length)
    return torch.where(real, first + p, 0), real, (p < 0)


def _boundary(plan: Plan, pool, slots, n: int, HV: int, V: int, K: int, like) -> torch.Tensor:
    if pool is None or plan.starts[n] < plan.chunk:  # a fresh slot's contents are nobody's
        return torch.zeros(HV, V, K, dtype=torch.float32, device=like.device)
    return join_planes(pool.high[slots[n]], pool.low[slots[n]])


def check_plan(op: str, plan: Plan, rows: int, pool: StatePool | None, slots: list[int] | None) -> None:
    """Refuse a plan that is not of these rows, or whose slots are no slots of the pool, each of one sequence."""
    if plan.tokens != rows:
        raise ContractError(f"op {op}: the plan is of {plan.tokens} rows, found {rows}; build it from the lengths of this batch")
    if pool is None:
        return
    if plan.chunk != pool.chunk:
        raise ContractError(f"op {op}: the plan has chunks of {plan.chunk}, the pool of {pool.chunk}; expected numerics.gdn_chunk in both")
    taken = [slots[n] for n, length in enumerate(plan.lengths) if length]
    for n in taken:
        if not 0 <= n < len(pool.high):
            raise ContractError(f"op {op}: slot {n}: expected one of the pool's {len(pool.high)}")
        if taken.count(n) > 1:
            raise ContractError(f"op {op}: slot {n} is of {taken.count(n)} sequences; expected one slot for each")


def check_rows(op: str, q, k, v, g, beta) -> None:
    """Refuse rows that are not finite or lie outside what the op is for: 0 * inf in a tile's product would reach earlier rows, in the
    trainer only, and a key, decay or beta beyond its range makes an inf of finite rows."""
    for name, x, bad, expected in (
        *((name, x, ~torch.isfinite(x), "finite rows") for name, x in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta))),
        ("k", k, k.abs() > 2.0, "normalised keys (gdn.l2norm)"),
        ("g", g, g > 0.0, "a decay g <= 0 (gdn.gating)"),
        ("beta", beta, (beta < 0.0) | (beta > 1.0), "beta in [0, 1] (gdn.gating)"),
    ):
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            what = "not finite" if expected == "finite rows" else f"{x[at].item():g}"
            raise ContractError(
                f"op {op}: {name} of row {at[0]} is {what}; expected {expected}. Find the op that produced it "
                f"(isoexec trace) before trusting any logprob of this batch"
            )


def refuse_overflow(beyond, v, g) -> None:
    """Refuse finite rows whose solution is not finite: ``beyond`` [N, C] marks tile positions, ``v`` and ``g`` are the batch's."""
    if bool(beyond.any()):
        raise ContractError(
            f"op gdn: rows of one chunk leave the range of fp32 together (the batch has |v| up to {v.abs().max().item():g} and g down to "
            f"{g.min().item():g}); expected rows whose state stays finite. Find the op that produced them (isoexec trace) before trusting "
            f"any logprob of this batch"
        )
