"""The GPU implementations of the public core ops: workspaces and launches around kernels.py."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops.gdn import kernels, triton_hopper
from isoexec.ops.gdn.state import BLOCK, Plan, StatePool
from isoexec.ops.gdn.triton_launch import configured, limit, split


def check(q, k, v, g, beta, chunk: int) -> None:
    (T, H, K), (HV, V) = q.shape, v.shape[1:]
    want = {"q": (q, (T, H, K), torch.bfloat16), "k": (k, (T, H, K), torch.bfloat16), "v": (v, (T, HV, V), torch.bfloat16),
            "g": (g, (T, HV), torch.float32), "beta": (beta, (T, HV), torch.float32)}  # fmt: skip
    for name, (x, shape, dtype) in want.items():
        if x.shape != shape or x.dtype != dtype or not (x[:1] if name == "v" else x).is_contiguous():
            raise ContractError(
                f"op gdn.cpr_wy: {name} expected contiguous {shape} {dtype}, found {tuple(x.shape)} {x.dtype}"
                f"{'' if x.is_contiguous() else ', not contiguous'}"
            )
    if HV % H or K & (K - 1) or V & (V - 1) or min(K, V) < 16:
        raise ContractError(f"op gdn.cpr_wy: head sizes K {K}, V {V} must be powers of two >= 16 and HV {HV} a multiple of H {H}")


class Workspace:
    """G, beta [chunks, HV, C], E [chunks, HV, 3, C] fp32 and T, M [chunks, HV, C, C] bf16 of one call (kernels.prepass_kernel)."""

    def __init__(self, plan: Plan, HV: int, device):
        shape = (plan.chunks, HV, plan.chunk)
        self.G, self.b = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        self.E = torch.empty(plan.chunks, HV, 3, plan.chunk, dtype=torch.float32, device=device)
        self.T, self.M = (torch.empty(*shape, plan.chunk, dtype=torch.bfloat16, device=device) for _ in range(2))


def prepass(q, k, g, beta, plan: Plan, scale: float, pool: StatePool | None = None, slots=None) -> Workspace:
    (H, K), HV, C = q.shape[1:], g.shape[1], plan.chunk
    ws = Workspace(plan, HV, q.device)
    _, options = configured("prepass", C)
    ring_k, gates = (pool.k, pool.gates) if pool else (q, g)
    if plan.chunks:
        kernels.prepass_kernel[plan.chunks, H](
            q, k, g, beta, ring_k, gates, plan.sequence_table if slots is None else slots, plan.sequence_table, plan.chunk_table,
            ws.G, ws.b, ws.E, ws.T, ws.M, scale, ring_k.stride(0), gates.stride(0), H, HV, K, C, C.bit_length() - 1,
            POOL=pool is not None, **options,
        )  # fmt: skip
    return ws


def chain(q, k, v, plan: Plan, ws: Workspace, out_dtype, pool=None, slots=None, save=False, states=None, entry=None):
    """-> o, and for the backward u [T, HV, V] and the boundary state of every BLOCK tokens [blocks, HV, V, K], both bf16.

    states [chunks, HV, V, K] fp32 is filled with the state before every chunk, but not of one that is resumed.
    """
    C, o = plan.chunk, torch.empty(v.shape, dtype=out_dtype, device=v.device)
    if pool and states is None and entry is None and plan.whole_chunks >= limit("hopper_chunks") and triton_hopper.fits(q, k, v, C):
        if any(start % C for start in plan.starts):
            _chain(q, k, v, o, plan, ws, pool, slots, part=1)
        triton_hopper.whole_chunks(q, k, v, o, plan, ws, pool, slots)
        if any((start + length) % C for start, length in zip(plan.starts, plan.lengths)):
            _chain(q, k, v, o, plan, ws, pool, slots, part=2)
        return o, v, v
    return o, *_chain(q, k, v, o, plan, ws, pool, slots, save, states, entry)


def _chain(q, k, v, o, plan, ws, pool, slots, save=False, states=None, entry=None, part=0):
    """`kernels.chain_kernel` -> u, h of `chain`."""
    (H, K), (HV, V), C = q.shape[1:], v.shape[1:], plan.chunk
    u, h, first_block = v, v, plan.sequence_table
    if save:
        first_block, table = plan.blocks
        u = torch.empty(v.shape, dtype=torch.bfloat16, device=v.device)
        h = torch.empty(table.shape[0], HV, V, K, dtype=torch.bfloat16, device=v.device)
    name = "chain_narrow" if len(plan.lengths) * HV <= limit("narrow") else "chain"
    constants, options = configured(name, C, V) if entry is None else split(entry)
    high, low, ring_k, rhs = (pool.high, pool.low, pool.k, pool.rhs) if pool else (v, v, v, v)
    if plan.chunks:
        kernels.chain_kernel[V // constants["BV"], len(plan.lengths) * HV](
            q, k, v, o, high, low, ring_k, rhs, plan.sequence_table if slots is None else slots, plan.sequence_table,
            ws.b, ws.E, ws.T, ws.M, u, h, first_block, h if states is None else states, v.stride(0), high.stride(0), ring_k.stride(0),
            rhs.stride(0), H, HV, K, V, C, constants["BV"], BLOCK, POOL=pool is not None, SAVE=save, EACH=states is not None,
            STAGES=constants["stages"], UNROLL=constants.get("unroll", 1), PART=part, **options,
        )  # fmt: skip
    return u, h


def train(q, k, v, g, beta, plan, scale=None, out_dtype=torch.bfloat16):
    from isoexec.ops.gdn.triton_gradient import Core

    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    check(q, k, v, g, beta, plan.chunk)
    if any(plan.starts):
        raise ContractError("op gdn.cpr_wy: the trainer runs whole sequences; this plan resumes some: use cpr_wy_prefill")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Core.apply(q, k, v, g, beta, plan, scale, out_dtype)


def prefill(q, k, v, g, beta, plan, pool, slots, scale=None, out_dtype=torch.bfloat16, states=None, entry=None):
    q, k, g, beta = (x.contiguous() for x in (q, k, g, beta))
    v = v if v[:1].is_contiguous() and v.stride(0) % 8 == 0 else v.contiguous()  # rows of the mixer's channels are taken as they lie
    check(q, k, v, g, beta, plan.chunk)
    check_pool(pool, plan.chunk, q, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    (H, K), HV, C = q.shape[1:], v.shape[1], plan.chunk
    ws = prepass(q, k, g, beta, plan, scale, pool, slots)
    o, _, _ = chain(q, k, v, plan, ws, out_dtype, pool, slots, states=states, entry=entry)
    if plan.chunks:
        _, options = configured("tail", C)
        kernels.tail_kernel[len(plan.lengths), H](
            k, pool.k, pool.gates, slots, plan.sequence_table, ws.G, ws.b, pool.k.stride(0), pool.gates.stride(0), H, HV, K, C,
            **options,
        )  # fmt: skip
    return o


def check_pool(pool: StatePool, chunk: int, q, v) -> None:
    if pool.chunk != chunk:
        raise ContractError(f"op gdn.cpr_wy: the plan's C is {chunk}, the pool's {pool.chunk}: one C serves every case")
    for name, (shape, dtype) in StatePool.spec(*q.shape[1:2], v.shape[1], q.shape[2], v.shape[2], chunk).items():
        field = getattr(pool, name)
        if field.shape[1:] != shape or field.dtype != dtype or not field[0].is_contiguous():
            found = f"{tuple(field.shape[1:])} {field.dtype}"
            raise ContractError(f"op gdn.cpr_wy: pool.{name} expected slots of {shape} {dtype}, found {found}")
