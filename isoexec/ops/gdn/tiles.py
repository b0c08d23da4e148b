"""Tile functions of `cpr_wy` in Triton: the formula of reference.py, shared by every kernel of the trainer, prefill and decode."""

from __future__ import annotations

import triton
import triton.language as tl

from isoexec.ops._core.triton_math import dot, dot_add


@triton.jit
def high_plane(S):
    """bf16 operand of fp32 S: (bits + 0x8000) >> 16 (state.split_planes)."""
    bits = S.to(tl.int32, bitcast=True)
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def low_plane(S):
    return S.to(tl.int32, bitcast=True).to(tl.int16)


@triton.jit
def join_planes(high, low):
    carry = (low < 0).to(tl.int32)
    bits = ((high.to(tl.int16, bitcast=True).to(tl.int32) - carry) << 16) | (low.to(tl.int32) & 0xFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def decay_tile(G, keep):
    """e^{G_t - G_s} where ``keep``, else 1: the masked exponents may be positive and overflow."""
    return tl.exp(tl.where(keep, G[:, None] - G[None, :], 0.0))


@triton.jit
def solve_tile(kk, G, beta, C: tl.constexpr, LOGC: tl.constexpr):
    """T = bf16((I + A)^-1) of kk = k k^T, by block doubling with tf32 products."""
    i = tl.arange(0, C)
    row = i[:, None]
    col = i[None, :]
    low = row > col
    A = tl.where(low, (kk * decay_tile(G, low)) * beta[:, None], 0.0)
    T = tl.where((row // 2 == col // 2) & low, -A, tl.where(row == col, 1.0, 0.0))
    for level in tl.static_range(1, LOGC):
        below = ((row >> level) % 2 == 1) & ((col >> level) == (row >> level) - 1)
        X = tl.dot(tl.where(below, A, 0.0), T, input_precision="tf32")
        Y = tl.dot(T, X, input_precision="tf32")
        T = tl.where(below, -Y, T)
    return T.to(tl.bfloat16)


@triton.jit
def score_tile(qk, G, scale, C: tl.constexpr):
    """M = bf16(scale (q . k) e^{G_t - G_s}) for s <= t, of qk = q k^T."""
    i = tl.arange(0, C)
    keep = i[:, None] >= i[None, :]
    return tl.where(keep, (qk * decay_tile(G, keep)) * scale, 0.0).to(tl.bfloat16)


@triton.jit
def rhs_of(ks, vT, eG, beta):
    """-> rhs^T [BV, C] bf16, of ks = S_high k^T; eG = e^G"""
    return ((vT.to(tl.float32) - ks * eG[None, :]) * beta[None, :]).to(tl.bfloat16)


@triton.jit
def moved(uT, left):
    """u^T [BV, C] as the next state takes it, bf16; left = e^{G_C - G}"""
    return (uT * left[None, :]).to(tl.bfloat16)


@triton.jit
def rhs_tile(S_high, k, vT, eG, beta):
    """`rhs_of`, with its product."""
    return rhs_of(dot(S_high, tl.trans(k)), vT, eG, beta)


@triton.jit
def out_tile(S_high, q, uT, M, eGs):
    """-> o^T [BV, C] fp32, of uT fp32; eGs = e^G scale"""
    acc = dot(S_high, tl.trans(q)) * eGs[None, :]
    return dot_add(uT.to(tl.bfloat16), tl.trans(M), acc)


@triton.jit
def next_state(S, uT, k, left, eC):
    """S' of a complete chunk; left of `moved`, eC = e^{G_C}"""
    return dot_add(moved(uT, left), k, S * eC)


@triton.jit
def rows(base, i, d, stride, lo, hi):
    """Rows [lo, hi) of a [C, D] tile at ``base``, the others +0.0."""
    return tl.load(base + i[:, None] * stride + d[None, :], mask=((i >= lo) & (i < hi))[:, None], other=0.0)


@triton.jit
def rowsT(base, i, d, stride, lo, hi):
    """The same tile transposed, [D, C]."""
    return tl.load(base + i[None, :] * stride + d[:, None], mask=((i >= lo) & (i < hi))[None, :], other=0.0)
