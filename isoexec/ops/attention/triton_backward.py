"""Gradients of packed causal attention in Triton, from the output and the log-sum-exp: two passes, no atomics, the same bits in every run.

One program owns a block of keys of one key head (their gradients are sums over all of its query heads, ascending), one a block of queries of
one head. The probabilities are recomputed: P = exp(scale q k^T - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K,
dK = scale dS^T Q (FlashAttention 2, arXiv 2307.08691).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from isoexec.ops._core.triton_math import COMPILE, dot, dot_add

#: Head sizes with tiles: head size -> (queries, keys, warps, stages) of the pass over keys and of the pass over queries.
TILES = {
    32: ((64, 64, 4, 2), (64, 64, 4, 2)),
    64: ((64, 128, 8, 2), (128, 64, 8, 3)),
    128: ((64, 64, 4, 2), (128, 64, 8, 3)),
    256: ((64, 64, 8, 2), (128, 32, 8, 3)),
}
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def delta_kernel(grad, out, delta, T, H: tl.constexpr, K: tl.constexpr, R: tl.constexpr):
    """delta [H, T] = row sums of grad * out [T, H, K]."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    here = row < T * H
    at = row[:, None] * K + tl.arange(0, K)[None, :]
    g = tl.load(grad + at, mask=here[:, None], other=0.0).to(tl.float32)
    o = tl.load(out + at, mask=here[:, None], other=0.0).to(tl.float32)
    tl.store(delta + row % H * T + row // H, tl.sum(g * o, 1), mask=here)


@triton.jit
def _keys_step(q, grad, lse, delta, k, v, dk, dv, start, new, first, head, key, T, scale, K: tl.constexpr, BM: tl.constexpr):
    """Adds one block of queries, ``first`` of the sequence and on, to the gradients of a block of keys."""
    i = first + tl.arange(0, BM)
    real = i < new
    at = head * T + start + i
    q_MK = q.load([start + first, head * K])
    g_MK = grad.load([start + first, head * K])
    l_M = tl.load(lse + at, mask=real, other=0.0) * _LOG2E
    d_M = tl.load(delta + at, mask=real, other=0.0)
    visible = (key[:, None] <= i[None, :]) & real[None, :]
    p_NM = tl.where(visible, tl.exp2(dot(k, tl.trans(q_MK)) * (scale * _LOG2E) - l_M[None, :]), 0.0)
    dv = dot_add(p_NM.to(tl.bfloat16), g_MK, dv)
    ds_NM = tl.where(visible, p_NM * (dot(v, tl.trans(g_MK)) - d_M[None, :]), 0.0)
    return dot_add(ds_NM.to(tl.bfloat16), q_MK, dk), dv


@triton.jit
def keys_kernel(q, keys, values, grad, lse, delta, grad_k, grad_v, cu_seqlens, T, scale, G: tl.constexpr, REPEAT: tl.constexpr,
                K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Program (sequence and key head, block of keys); the blocks with most queries come first."""
    b = tl.program_id(0) // G
    g = tl.program_id(0) % G
    start = tl.load(cu_seqlens + b)
    new = tl.load(cu_seqlens + b + 1) - start
    n = tl.program_id(1) * BN
    if n < new:
        key = n + tl.arange(0, BN)
        k = keys.load([start + n, g * K])
        v = values.load([start + n, g * K])
        dk = tl.zeros([BN, K], dtype=tl.float32)
        dv = tl.zeros([BN, K], dtype=tl.float32)
        for r in range(REPEAT):
            for first in range(n, new, BM):
                dk, dv = _keys_step(q, grad, lse, delta, k, v, dk, dv, start, new, first, g * REPEAT + r, key, T, scale, K, BM)
        at = ((start + key).to(tl.int64) * G + g)[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(grad_k + at, (dk * scale).to(grad_k.dtype.element_ty), mask=(key < new)[:, None])
        tl.store(grad_v + at, dv.to(grad_v.dtype.element_ty), mask=(key < new)[:, None])


@triton.jit
def _queries_step(keys, values, q, g, l_M, d_M, dq, start, first, column, i, scale, BN: tl.constexpr, MASK: tl.constexpr):
    """Adds one block of keys to the gradients of a block of queries."""
    k_NK = keys.load([start + first, column])
    v_NK = values.load([start + first, column])
    p_MN = tl.exp2(dot(q, tl.trans(k_NK)) * (scale * _LOG2E) - l_M[:, None])
    if MASK:
        p_MN = tl.where((first + tl.arange(0, BN))[None, :] <= i[:, None], p_MN, 0.0)
    ds_MN = p_MN * (dot(g, tl.trans(v_NK)) - d_M[:, None])
    if MASK:
        ds_MN = tl.where((first + tl.arange(0, BN))[None, :] <= i[:, None], ds_MN, 0.0)
    return dot_add(ds_MN.to(tl.bfloat16), k_NK, dq)


@triton.jit
def queries_kernel(q, keys, values, grad, lse, delta, grad_q, cu_seqlens, T, scale, H: tl.constexpr, REPEAT: tl.constexpr, K: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Program (sequence and head, block of queries); the blocks that see most keys come first."""
    b = tl.program_id(0) // H
    head = tl.program_id(0) % H
    start = tl.load(cu_seqlens + b)
    new = tl.load(cu_seqlens + b + 1) - start
    m = tl.cdiv(new, BM) - 1 - tl.program_id(1)
    if m >= 0:
        i = m * BM + tl.arange(0, BM)
        at = head * T + start + i
        l_M = tl.load(lse + at, mask=i < new, other=0.0) * _LOG2E
        d_M = tl.load(delta + at, mask=i < new, other=0.0)
        q_MK = q.load([start + m * BM, head * K])
        g_MK = grad.load([start + m * BM, head * K])
        dq = tl.zeros([BM, K], dtype=tl.float32)
        column = head // REPEAT * K
        whole = m * BM // BN * BN
        for first in range(0, whole, BN):
            dq = _queries_step(keys, values, q_MK, g_MK, l_M, d_M, dq, start, first, column, i, scale, BN, False)
        for first in range(whole, tl.minimum(m * BM + BM, new), BN):
            dq = _queries_step(keys, values, q_MK, g_MK, l_M, d_M, dq, start, first, column, i, scale, BN, True)
        place = ((start + i).to(tl.int64) * H + head)[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(grad_q + place, (dq * scale).to(grad_q.dtype.element_ty), mask=(i < new)[:, None])


def _rows(x, rows):
    """[T, H, K] as blocks [rows, K] of one head's tokens. A block may reach into the next sequence; its scores there
    are selected away, so what it finds must be finite."""
    return TensorDescriptor(x, [x.shape[0], x.shape[1] * x.shape[2]], [x.stride(0), 1], [rows, x.shape[2]])


def _packed(x):
    """``x`` [T, H, K] with adjacent heads, and tokens at multiples of 16 bytes."""
    plain = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if plain else x.contiguous()


def gradients(grad, q, k, v, cu_seqlens, out, lse, scale, longest):
    """Gradients (q, k, v) in their dtypes.

    Args:
        grad, q, out: [T, H, K] bf16; k, v: [T, G, K] bf16; cu_seqlens: [B + 1] int32; lse: [H, T] fp32.
        longest: bound of the sequences' lengths.
    """
    (T, H, K), G = q.shape, k.shape[1]
    grad, out = grad.contiguous(), out.contiguous()
    q, k, v = (_packed(x) for x in (q, k, v))
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    delta = torch.empty(H, T, dtype=torch.float32, device=q.device)
    R = 4096 // K
    delta_kernel[triton.cdiv(T * H, R),](grad, out, delta, T, H, K, R, num_warps=4, **COMPILE)
    (BM, BN, warps, stages), sequences = TILES[K][0], cu_seqlens.shape[0] - 1
    keys_kernel[sequences * G, triton.cdiv(longest, BN)](
        _rows(q, BM), _rows(k, BN), _rows(v, BN), _rows(grad, BM), lse, delta, grads[1], grads[2], cu_seqlens, T, scale, G, H // G, K, BM, BN,
        num_warps=warps, num_stages=stages, **COMPILE,
    )  # fmt: skip
    BM, BN, warps, stages = TILES[K][1]
    queries_kernel[sequences * H, triton.cdiv(longest, BM)](
        _rows(q, BM), _rows(k, BN), _rows(v, BN), _rows(grad, BM), lse, delta, grads[0], cu_seqlens, T, scale, H, H // G, K, BM, BN,
        num_warps=warps, num_stages=stages, **COMPILE,
    )  # fmt: skip
    return grads
