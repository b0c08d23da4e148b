"""Combine in Triton: a token's pairs by ascending expert index, group by group, groups by the tree, one rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.contract import ContractError
from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE

_BLOCK = 1024  # channels per program of the gradient
_MAX_GROUPS = 8
#: Channels and warps per program, and programs that share out the tokens; moves no bit. Few tokens: (tokens up to, channels, warps).
_FEW, _MANY, _PROGRAMS = (64, 256, 4), (1024, 4), 4096


@triton.jit
def _pick(values, mask):
    """The one integer of ``values`` that ``mask`` selects."""
    return tl.sum(tl.where(mask, values, 0), 0)


@triton.jit
def combine_kernel(values, weights, experts, shared, out, T, first_expert, D, TOP: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr,
                   PER_GROUP: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Programs (some of the tokens, block of channels); ``out`` in its own dtype. Pairs of other ranks' groups are left out, not multiplied by zero.

    A token's experts and weights are asked for while the token before is added, and all of its values before the first is used.
    """
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = c < D
    r = tl.arange(0, P)
    step = tl.num_programs(0)
    token = tl.program_id(0).to(tl.int64)
    pairs = token * TOP + r
    e = tl.load(experts + pairs, mask=r < TOP, other=1 << 40)
    weight = tl.load(weights + pairs, mask=r < TOP, other=0.0).to(tl.int32, bitcast=True)
    for _ in range(tl.cdiv(T - tl.program_id(0), step)):
        rank = tl.sum((e[None, :] < e[:, None]).to(tl.int32), 1)
        rank = tl.where(r < TOP, rank, P)
        # -1: in no group of this rank.
        group = tl.where((e >= first_expert) & (r < TOP), (e - first_expert) // PER_GROUP, -1).to(tl.int32)
        group = tl.where(group < GROUPS, group, -1)
        v = ()
        w = ()
        owner = ()
        for i in tl.static_range(TOP):
            g = _pick(group, rank == i)
            at = token * TOP + _pick(r, rank == i)
            v = v + (tl.load(values + at * D + c, mask=here & (g >= 0), other=0.0),)
            w = w + (_pick(weight, rank == i).to(tl.float32, bitcast=True),)
            owner = owner + (g,)
        pairs += step * TOP
        more = (r < TOP) & (token + step < T)
        e = tl.load(experts + pairs, mask=more, other=1 << 40)
        weight = tl.load(weights + pairs, mask=more, other=0.0).to(tl.int32, bitcast=True)
        # Pairs are in the order of their groups. A sum is closed into the level above where the next pair's group leaves it; groups without a pair
        # are left out, since adding their +0.0 to a sum that began with +0.0 changes no bit.
        total = tl.zeros([BLOCK], dtype=tl.float32)
        one = total
        two = total
        four = total
        for i in tl.static_range(TOP):
            g = owner[i]
            if g >= 0:
                total += v[i].to(tl.float32) * w[i]
            if i + 1 < TOP:
                following = owner[i + 1]
            else:
                following = g * 0 - 2
            if following != g:
                one += total
                total = tl.zeros([BLOCK], dtype=tl.float32)
                if (following >> 1) != (g >> 1):
                    two += one
                    one = total
                    if (following >> 2) != (g >> 2):
                        four += two
                        two = total
        total = four
        if SHARED:
            total = total + tl.load(shared + token * D + c, mask=here, other=0.0).to(tl.float32)
        tl.store(out + token * D + c, total.to(out.dtype.element_ty), mask=here)
        token += step


@triton.jit
def combine_grad_kernel(grad, values, weights, grad_values, grad_weights, D, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """Program (pair): its value's gradient, and its weight's, a sum in the fixed order of this launch."""
    pair = tl.program_id(0).to(tl.int64)
    w = tl.load(weights + pair)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for first in range(0, D, BLOCK):
        c = first + tl.arange(0, BLOCK)
        g = tl.load(grad + pair // TOP * D + c, mask=c < D, other=0.0).to(tl.float32)
        v = tl.load(values + pair * D + c, mask=c < D, other=0.0).to(tl.float32)
        total += g * v
        tl.store(grad_values + pair * D + c, (g * w).to(grad_values.dtype.element_ty), mask=c < D)
    tl.store(grad_weights + pair, tl.sum(total, 0))


def total(values, weights, experts, shared, first_expert, groups, experts_per_group, dtype):
    """Sum [T, D] in ``dtype`` over ``groups`` expert groups from ``first_expert``, and ``shared`` last where it is given."""
    T, k, D = values.shape
    if groups > _MAX_GROUPS:
        raise ContractError(f"op moe.combine: {groups} expert groups on one rank; the GPU form adds up to {_MAX_GROUPS}")
    out = torch.empty(T, D, dtype=dtype, device=values.device)
    if T:
        block, warps = _FEW[1:] if T <= _FEW[0] else _MANY
        block = min(block, power_of_two(D))
        combine_kernel[min(T, _PROGRAMS), triton.cdiv(D, block)](
            values.contiguous(), weights.contiguous(), experts.contiguous(), out if shared is None else shared.contiguous(), out, T, first_expert, D,
            k, power_of_two(k), groups, experts_per_group, shared is not None, block, num_warps=warps, num_stages=1, **COMPILE,
        )  # fmt: skip
    return out


def gradients(grad, values, weights):
    """(grad_values [T, k, D], grad_weights [T, k]) for the gradient [T, D] of the sum."""
    T, k, D = values.shape
    values, weights = values.contiguous(), weights.contiguous()
    grad_values, grad_weights = torch.empty_like(values), torch.empty_like(weights)
    if T:
        combine_grad_kernel[T * k,](
            grad.contiguous(), values, weights, grad_values, grad_weights, D, k, _BLOCK, num_warps=4, **COMPILE
        )
    return grad_values, grad_weights
