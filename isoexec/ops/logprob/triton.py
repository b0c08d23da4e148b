"""Log-softmax and token logprob in Triton, over tiles of the vocabulary: no [T, V] tensor but the logits, their gradient and a requested output.

Three launches: exact maximum per tile; sums of exp(x - max) per block of the vocabulary; the tree over the blocks, log, the token's entry.
Every sum is a tree of two-term additions, so tile and warps move no bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.ops._core.rows import power_of_two
from isoexec.ops._core.triton_math import COMPILE, INTERPRET, row_sum
from isoexec.ops.collective.reference import all_gather, group_size
from isoexec.ops.logprob.reference import shard_columns

_TILE = 4096  # vocabulary entries per program
_SUMS_BYTES = 64 << 20  # of block sums held at once: more tokens take their turns, which moves no bit
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
def sums_kernel(logits, maxima, sums, real, blocks, outer, tiles, TILES: tl.constexpr, BLOCK: tl.constexpr, LOGB: tl.constexpr,
                PER_TILE: tl.constexpr):  # fmt: skip
    """``maxima`` [T, tiles]: of the parts of a row, or of its tensor-parallel shards."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILES)
    maximum = tl.max(tl.load(maxima + row * tiles + i, mask=i < tiles, other=_LOWEST), 0)
    b = tl.program_id(1) * PER_TILE + tl.arange(0, PER_TILE)
    c = b[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * outer + c, mask=c < real, other=_LOWEST)
    # Entries that do not exist are selected away: their exp is +0.0 whatever the memory holds.
    e = tl.where(c < real, tl.exp(x - maximum), 0.0)
    at = sums + row * blocks + b
    tl.store(at[:, None], row_sum(e, PER_TILE, BLOCK, LOGB), mask=(b < blocks)[:, None])


@triton.jit
def _tree(x, N: tl.constexpr, LOGN: tl.constexpr):
    """Neighbours first: the balanced tree over the next power of two."""
    for level in tl.static_range(LOGN):
        x = tl.sum(tl.reshape(x, (N >> (level + 1), 2)), 1)
    return tl.reshape(x, (1,))


@triton.jit
def total_kernel(sums, maxima, target, tokens, totals, maximum_out, out, blocks, tiles, vocab, outer, N: tl.constexpr, LOGN: tl.constexpr,
                 TILES: tl.constexpr, TOKEN: tl.constexpr, GATHER: tl.constexpr):  # fmt: skip
    """Sum and maximum of a row; ``TOKEN``: the logprob of its token, whose logit is target[row], or with ``GATHER`` target[row, token]."""
    row = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    i = tl.arange(0, TILES)
    maximum = tl.max(tl.load(maxima + row * tiles + i, mask=i < tiles, other=_LOWEST), 0)
    i = tl.arange(0, N)
    total = _tree(tl.load(sums + row * blocks + i, mask=i < blocks, other=0.0), N, LOGN)
    tl.store(maximum_out + row, maximum)
    tl.store(totals + row + one, total)
    if TOKEN:
        token = tl.load(tokens + row)
        # A host read would stall the stream; this stops the device, and the next synchronisation reports it.
        tl.device_assert((token >= 0) & (token < vocab), "logprob.token_logprob: token id outside the vocabulary")
        at = row * outer + token if GATHER else row
        tl.store(out + row + one, (tl.load(target + at) - maximum) - tl.log(total))


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
    if temperature.shape == (1,) != logits.shape[:1]:
        temperature = temperature[0]
    return _ScaleByTemperature.apply(logits, temperature)


def _maxima(logits, real: int):
    """Exact maxima [T, tiles] of the first ``real`` entries; -inf for a shard that holds padding only."""
    T, tiles = logits.shape[0], max(triton.cdiv(real, _TILE), 1)
    maxima = torch.empty(T, tiles, dtype=torch.float32, device=logits.device)
    max_kernel[T, tiles](logits, maxima, real, logits.stride(0), tiles, _TILE, num_warps=8, **COMPILE)
    return maxima


def _block_sums(logits, maxima, real: int, vocab_block: int):
    """Sums of exp(logits - maximum) [T, blocks of this shard, padding included]."""
    T, V = logits.shape
    blocks, per_tile, tiles = triton.cdiv(V, vocab_block), max(_TILE // vocab_block, 1), maxima.shape[1]
    sums = torch.empty(T, blocks, dtype=torch.float32, device=logits.device)
    sums_kernel[T, triton.cdiv(blocks, per_tile)](
        logits, maxima, sums, real, blocks, logits.stride(0), tiles, power_of_two(tiles), vocab_block, vocab_block.bit_length() - 1, per_tile,
        num_warps=8, **COMPILE,
    )  # fmt: skip
    return sums


def _totals(sums, maxima, target=None, tokens=None, vocab_size=0):
    """(sum [T], maximum [T], logprob [T] of ``tokens`` or nothing); ``target`` [T, V] logits, or [T] the tokens' own."""
    (T, blocks), tiles = sums.shape, maxima.shape[1]
    totals, maximum, out = (torch.empty(T, dtype=torch.float32, device=sums.device) for _ in range(3))
    N, given = power_of_two(blocks), tokens is not None
    gather = given and target.dim() == 2
    debug = {} if INTERPRET else {"debug": given}  # compiles the assertion in
    total_kernel[T,](
        sums, maxima, target if given else sums, tokens if given else sums, totals, maximum, out, blocks, tiles, vocab_size,
        target.stride(0) if gather else 0, N, N.bit_length() - 1, power_of_two(tiles), given, gather, num_warps=4, **debug, **COMPILE,
    )  # fmt: skip
    return totals, maximum, out


def _turns(tokens: int, vocabulary: int, vocab_block: int):
    """Slices of the tokens whose block sums fit `_SUMS_BYTES` (at least one token each)."""
    step = max(_SUMS_BYTES // (4 * triton.cdiv(vocabulary, vocab_block)), 1)
    return [slice(first, first + step) for first in range(0, tokens, step)]


def log_softmax(logits, *, vocab_size, vocab_block):
    logits = _row_major(logits)
    T, V = logits.shape
    out = torch.empty(T, V, dtype=torch.float32, device=logits.device)
    for turn in _turns(T, V, vocab_block):
        part = logits[turn]
        maxima = _maxima(part, vocab_size)
        totals, maximum, _ = _totals(_block_sums(part, maxima, vocab_size, vocab_block), maxima)
        rows_kernel[len(part), triton.cdiv(V, _TILE)](
            part, maximum, totals, out[turn], vocab_size, V, logits.stride(0), _TILE, num_warps=8, **COMPILE
        )
    return out


def _parts(logits, real, vocab_block, tp):
    """(block sums of the whole vocabulary [T, blocks], maxima [T, parts])."""
    maxima = _maxima(logits, real)
    if tp is not None:
        maxima = all_gather(maxima.amax(1), tp.group).t().contiguous()
    sums = _block_sums(logits, maxima, real, vocab_block)
    if tp is not None:
        sums = all_gather(sums, tp.group).transpose(0, 1).flatten(1)
    return sums, maxima


def _of_tokens(logits, tokens, first, real, vocab_size, vocab_block, tp):
    """(sum, maximum, logprob) [T] of ``tokens``, over all ranks' shards."""
    target = logits
    if tp is not None:
        local, width = tokens - first, logits.shape[1]
        mine = (local >= 0) & (local < real)
        target = logits.gather(1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
        target = all_gather(target, tp.group).gather(0, (tokens.clamp(0, vocab_size - 1) // width).unsqueeze(0)).squeeze(0)
    return _totals(*_parts(logits, real, vocab_block, tp), target, tokens, vocab_size)


def token_gradient(grad, logits, tokens, maximum, total, *, first, real):
    """As :func:`isoexec.ops.logprob.reference.token_gradient`."""
    T, V = logits.shape
    out = torch.empty(T, V, dtype=torch.float32, device=logits.device)
    grad_kernel[T, triton.cdiv(V, _TILE)](
        grad.contiguous(), logits, tokens, maximum, total, out, first, real, V, logits.stride(0), _TILE, num_warps=8, **COMPILE
    )
    return out


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, vocab_size, vocab_block, tp, keep):
        logits = _row_major(logits)
        T, width = logits.shape
        first, real = ctx.first, ctx.real = shard_columns(width, vocab_size, tp)
        turns = _turns(T, width * group_size(tp), vocab_block)
        parts = [_of_tokens(logits[turn], tokens[turn], first, real, vocab_size, vocab_block, tp) for turn in turns]
        totals, maximum, out = (torch.cat(part) for part in zip(*parts)) if len(parts) > 1 else parts[0]
        ctx.save_for_backward(logits, tokens, maximum, totals)
        if keep is not None:
            keep(maximum, totals)
        return out

    @staticmethod
    def backward(ctx, grad):
        return token_gradient(grad, *ctx.saved_tensors, first=ctx.first, real=ctx.real), None, None, None, None, None


def token_logprob(logits, tokens, *, vocab_size, vocab_block, tp=None, keep=None):
    if not logits.shape[0]:
        return logits.sum(1)
    tp = tp if group_size(tp) > 1 else None
    return _TokenLogprob.apply(logits, tokens.to(torch.int64).contiguous(), vocab_size, vocab_block, tp, keep)
