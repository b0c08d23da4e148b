"""Log-softmax and token logprob in Triton, over tiles of the vocabulary: no [T, V] tensor but the logits, their gradient and a requested output.

Three launches: exact maximum per tile; sums of exp(x - max) per block of the vocabulary; the tree over the blocks, log and the token's entry.
Every sum is a tree of two-term additions, so tile and warps move no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.contract import ContractError
from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE, row_sum
from isoexec.ops.collective.reference import all_gather, group_size
from isoexec.ops.logprob.reference import _expect_fp32

_TILE = 4096  # vocabulary entries per program
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit
def scale_kernel(logits, temperature, out, V, outer, PER_ROW: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    T = tl.load(temperature + (row if PER_ROW else 0))
    x = tl.load(logits + row * outer + c, mask=c < V, other=0.0)
    tl.store(out + row * V + c, tl.div_rn(x, T + tl.zeros([TILE], dtype=tl.float32)), mask=c < V)


@triton.jit
def max_kernel(logits, maxima, real, outer, tiles, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    c = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * outer + c, mask=c < real, other=_LOWEST)
    tl.store(maxima + row * tiles + tile, tl.max(x, 0))


@triton.jit
def sums_kernel(logits, maximum, sums, real, blocks, outer, BLOCK: tl.constexpr, LOGB: tl.constexpr, PER_TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * PER_TILE + tl.arange(0, PER_TILE)
    c = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * outer + c, mask=c < real, other=_LOWEST)
    # Entries that do not exist are selected away: their exp is +0.0 whatever the memory holds.
    e = tl.where(c < real, tl.exp(x - tl.load(maximum + row)), 0.0)
    at = sums + row * blocks + b
    tl.store(at[:, None], row_sum(e, PER_TILE, BLOCK, LOGB), mask=(b < blocks)[:, None])


@triton.jit
def _tree(x, N: tl.constexpr, LOGN: tl.constexpr):
    """Neighbours first: the balanced tree over the next power of two."""
    for level in tl.static_range(LOGN):
        x = tl.sum(tl.reshape(x, (N >> (level + 1), 2)), 1)
    return tl.reshape(x, (1,))


@triton.jit
def total_kernel(sums, totals, blocks, N: tl.constexpr, LOGN: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, N)
    x = tl.load(sums + row * blocks + i, mask=i < blocks, other=0.0)
    tl.store(totals + row + tl.arange(0, 1), _tree(x, N, LOGN))


@triton.jit
def token_kernel(target, maximum, totals, out, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = row < count
    x = tl.load(target + row, mask=here, other=0.0)
    x = (x - tl.load(maximum + row, mask=here, other=0.0)) - tl.log(tl.load(totals + row, mask=here, other=1.0))
    tl.store(out + row, x, mask=here)


@triton.jit
def rows_kernel(logits, maximum, totals, out, real, V, outer, TILE: tl.constexpr):
    """The whole log-softmax row; -inf beyond the real vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * outer + c, mask=c < real, other=0.0)
    x = (x - tl.load(maximum + row)) - tl.log(tl.load(totals + row) + tl.zeros([1], dtype=tl.float32))
    tl.store(out + row * V + c, tl.where(c < real, x, _LOWEST), mask=c < V)


@triton.jit
def grad_kernel(grad, logits, tokens, maximum, totals, out, first, real, V, outer, TILE: tl.constexpr):
    """grad * (onehot - p); ``first``: global id of this shard's column 0."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * outer + c, mask=c < real, other=_LOWEST)
    g = tl.load(grad + row)
    p = tl.exp(x - tl.load(maximum + row)) / tl.load(totals + row)
    value = tl.where(c < real, p * (0.0 - g), 0.0)
    value += tl.where((c < real) & (c == tl.load(tokens + row) - first), g, 0.0)
    tl.store(out + row * V + c, value, mask=c < V)


def _row_major(logits):
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class _ScaleByTemperature(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature):
        ctx.save_for_backward(temperature)
        return _scale(logits, temperature)

    @staticmethod
    def backward(ctx, grad):
        return _scale(grad, *ctx.saved_tensors), None


def _scale(logits, temperature):
    logits = _row_major(logits)
    T, V = logits.shape
    out = torch.empty(T, V, dtype=torch.float32, device=logits.device)
    if out.numel():
        scale_kernel[T, triton.cdiv(V, _TILE)](
            logits, temperature.contiguous(), out, V, logits.stride(0), temperature.dim() > 0, _TILE, num_warps=8, **COMPILE
        )
    return out


def scale_by_temperature(logits, temperature):
    _expect_fp32("scale_by_temperature", logits)
    _expect_fp32("scale_by_temperature", temperature)
    if temperature.shape not in ((), (1,), logits.shape[:1]):
        raise ContractError(f"logprob.scale_by_temperature: temperature {tuple(temperature.shape)} for logits {tuple(logits.shape)}; expected a scalar or [T]")
    if temperature.shape == (1,) != logits.shape[:1]:
        temperature = temperature[0]
    return _ScaleByTemperature.apply(logits, temperature)


def _maximum(logits, real: int):
    """Exact maximum [T] of the first ``real`` entries; -inf for a shard that holds padding only."""
    T, tiles = logits.shape[0], max(triton.cdiv(real, _TILE), 1)
    maxima = torch.empty(T, tiles, dtype=torch.float32, device=logits.device)
    max_kernel[T, tiles](logits, maxima, real, logits.stride(0), tiles, _TILE, num_warps=8, **COMPILE)
    return maxima.amax(1)


def _block_sums(logits, maximum, real: int, vocab_block: int):
    """Sums of exp(logits - maximum) [T, blocks of this shard, padding included]."""
    T, V = logits.shape
    blocks, per_tile = triton.cdiv(V, vocab_block), max(_TILE // vocab_block, 1)
    sums = torch.empty(T, blocks, dtype=torch.float32, device=logits.device)
    sums_kernel[T, triton.cdiv(blocks, per_tile)](
        logits, maximum, sums, real, blocks, logits.stride(0), vocab_block, vocab_block.bit_length() - 1, per_tile, num_warps=8, **COMPILE
    )
    return sums


def _totals(sums):
    T, blocks = sums.shape
    totals = torch.empty(T, dtype=torch.float32, device=sums.device)
    N = power_of_two(blocks)
    total_kernel[T,](sums, totals, blocks, N, N.bit_length() - 1, num_warps=4, **COMPILE)
    return totals


def log_softmax(logits, *, vocab_size, vocab_block):
    _expect_fp32("log_softmax", logits)
    logits = _row_major(logits)
    T, V = logits.shape
    out = torch.empty(T, V, dtype=torch.float32, device=logits.device)
    if T:
        maximum = _maximum(logits, vocab_size)
        totals = _totals(_block_sums(logits, maximum, vocab_size, vocab_block))
        rows_kernel[T, triton.cdiv(V, _TILE)](
            logits, maximum, totals, out, vocab_size, V, logits.stride(0), _TILE, num_warps=8, **COMPILE
        )
    return out


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, vocab_size, vocab_block, tp):
        logits = _row_major(logits)
        T, width = logits.shape
        first = 0 if tp is None else torch.distributed.get_rank(tp.group) * width
        real = min(max(vocab_size - first, 0), width)
        maximum = _maximum(logits, real)
        local = tokens - first
        mine = (local >= 0) & (local < real)
        target = logits.gather(1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
        if tp is not None:
            maximum = all_gather(maximum, tp.group).amax(0)
            target = all_gather(target, tp.group).gather(0, (tokens // width).unsqueeze(0)).squeeze(0)
        sums = _block_sums(logits, maximum, real, vocab_block)
        if tp is not None:
            sums = all_gather(sums, tp.group).transpose(0, 1).flatten(1)
        totals = _totals(sums)
        out = torch.empty(T, dtype=torch.float32, device=logits.device)
        token_kernel[triton.cdiv(T, 256),](target, maximum, totals, out, T, 256, num_warps=4, **COMPILE)
        ctx.save_for_backward(logits, tokens, maximum, totals)
        ctx.first, ctx.real = first, real
        return out

    @staticmethod
    def backward(ctx, grad):
        logits, tokens, maximum, totals = ctx.saved_tensors
        T, V = logits.shape
        out = torch.empty(T, V, dtype=torch.float32, device=logits.device)
        grad_kernel[T, triton.cdiv(V, _TILE)](
            grad.contiguous(), logits, tokens, maximum, totals, out, ctx.first, ctx.real, V, logits.stride(0), _TILE, num_warps=8, **COMPILE
        )
        return out, None, None, None, None


def token_logprob(logits, tokens, *, vocab_size, vocab_block, tp=None):
    _expect_fp32("token_logprob", logits)
    ranks = group_size(tp)
    if ranks > 1 and logits.shape[1] % vocab_block:
        raise ContractError(
            f"logprob.token_logprob: a vocabulary shard of {logits.shape[1]} is not whole blocks of {vocab_block}; "
            "pad the vocabulary (Megatron: make-vocab-size-divisible-by) to a multiple of block * tensor-parallel degree"
        )
    if not logits.shape[0]:
        return logits.sum(1)
    # A host read would stall the stream: the check runs there, and reports at the next synchronisation.
    torch._assert_async(((tokens >= 0) & (tokens < vocab_size)).all(), f"logprob.token_logprob: token ids lie outside [0, {vocab_size})")
    return _TokenLogprob.apply(logits, tokens.to(torch.int64).contiguous(), vocab_size, vocab_block, tp if ranks > 1 else None)
