"""The CPU implementations of the public core ops: thin entry points over reference.py."""

from __future__ import annotations

import torch

from isoexec.ops.gdn.gradient import Core
from isoexec.ops.gdn.reference import run
from isoexec.ops.gdn.state import Plan


def train(q, k, v, g, beta, plan, scale=None, out_dtype=torch.bfloat16):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Core.apply(q, k, v, g, beta, plan, scale).to(out_dtype)


def prefill(q, k, v, g, beta, plan, pool, slots, scale=None, out_dtype=torch.bfloat16):
    return run(q, k, v, g, beta, plan, pool, slots.tolist(), scale).to(out_dtype)


def decode(q, k, v, g, beta, pool, slots, positions, scale=None, null_slot=-1, out_dtype=torch.bfloat16):
    o = torch.zeros(v.shape, dtype=torch.float32)
    owner = slots.tolist()
    live = [j for j, s in enumerate(owner) if s >= 0 and s != null_slot]
    if live:
        starts = positions[live].tolist()
        plan = Plan([1] * len(live), pool.chunk, starts)
        rows = (x[live] for x in (q, k, v, g, beta))
        o[live] = run(*rows, plan, pool, [owner[j] for j in live], scale)
    return o.to(out_dtype)
