"""Whole chunks of a prefill on sm_90: launch around kernels_hopper.py."""

from __future__ import annotations

import functools

import torch

from isoexec.ops.gdn import kernels_hopper as kernels
from isoexec.ops.gdn.triton_launch import configured


def fits(q, k, v, chunk: int) -> bool:
    """Whether the kernel is for this device, these heads, C and addresses: 64 rows of a state in registers, copies of 16 bytes."""
    heads = q.shape[2] in (64, 128) and v.shape[2] % 64 == 0 and chunk <= 32
    return heads and q.is_cuda and _is_hopper(q.device) and not any(x.data_ptr() % 16 for x in (q, k, v))


@functools.lru_cache(maxsize=None)
def _is_hopper(device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def whole_chunks(q, k, v, o, plan, ws, pool, slots) -> None:
    """All whole chunks of ``plan``: writes their rows of ``o`` and advances ``slots``."""
    (H, K), (HV, V), C = q.shape[1:], v.shape[1:], plan.chunk
    constants, options = configured("chain_hopper", C, V)
    BV = constants["BV"]
    kernels.whole_chunks_kernel[V // BV, len(plan.lengths) * HV](
        q, k, v, ws.T, ws.M, o, pool.high, pool.low, slots, plan.sequence_table, ws.b, ws.E, v.stride(0), pool.high.stride(0), H, HV, K, V,
        C, BV, constants["stages"], **options,
    )  # fmt: skip
