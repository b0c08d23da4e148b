"""Whole chunks of a prefill on sm_90: the launch around kernels_roles.py."""

from __future__ import annotations

import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from isoexec.ops.gdn import kernels_roles
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
    (T, H, K), (HV, V), C = q.shape, v.shape[1:], plan.chunk
    constants, options = configured("chain_roles", C, V)
    BV, places = constants["BV"], plan.chunks * HV
    keys = [_descriptor(x, [T, H * K], H * K, [C, 64]) for x in (q, k)]
    squares = [_descriptor(x, [places * C, C], C, [C, C]) for x in (ws.T, ws.M)]
    gates = [_descriptor(x, [x.numel()], 1, [4 * C]) for x in (ws.E, ws.b)]
    kernels_roles.chain_roles_kernel[V // BV, len(plan.lengths) * HV](
        *keys, _descriptor(v, [T, HV * V], v.stride(0), [C, BV]), *squares, *gates, o, pool.high, pool.low, slots, plan.sequence_table,
        pool.high.stride(0), H, HV, K, V, C, BV, constants["stages"], constants["held"], constants["output_warps"],
        (constants["registers"], constants["registers"]), **options,
    )  # fmt: skip


def _descriptor(x, shape, stride: int, block):
    """Blocks of ``x`` for the copy engine."""
    layout = gl.NVMMASharedLayout.get_default_for(block, {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}[x.dtype])
    return TensorDescriptor(x, shape, [stride, 1][-len(shape) :], block, layout)
