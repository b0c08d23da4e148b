"""Log-softmax and token logprob of the CPU backend, a few rows at a time: a row of the vocabulary is large."""

from __future__ import annotations

import torch

from isoexec.contract import ContractError
from isoexec.ops._core import math
from isoexec.ops._core.rowsum import row_sum, tree_sum
from isoexec.ops.collective.reference import all_gather, group_size

_BLOCK_ELEMENTS = 1 << 20  # logits per pass; exp keeps several fp64 copies of them


def _row_blocks(logits: torch.Tensor):
    step = max(_BLOCK_ELEMENTS // max(logits.shape[1], 1), 1)
    return [slice(i, i + step) for i in range(0, logits.shape[0], step)]


def scale_by_temperature(logits, temperature):
    if not bool((temperature > 0).all()):
        raise ContractError(f"logprob.scale_by_temperature: expected temperatures above 0, found {temperature.min().item()}")
    return logits / (temperature.unsqueeze(-1) if temperature.dim() else temperature)


def _block_sums(logits, maximum, vocab_block):
    """Sums of exp(logits - maximum) over each block of the vocabulary: [T, V] fp32 -> [T, blocks]; selected-out entries are -inf."""
    out = []
    for rows in _row_blocks(logits):
        x = torch.nn.functional.pad(logits[rows], (0, -logits.shape[1] % vocab_block), value=-torch.inf)
        out.append(row_sum(math.exp(x - maximum[rows, None]).unflatten(-1, (-1, vocab_block))))
    return torch.cat(out) if out else logits.new_zeros(0, -(-logits.shape[1] // vocab_block))


def _normaliser(sums):
    """Tree over the block sums [T, blocks] of the whole vocabulary -> [T]; absent blocks are +0.0, which changes no sum."""
    blocks = sums.shape[1]
    return tree_sum(torch.nn.functional.pad(sums, (0, (1 << (blocks - 1).bit_length()) - blocks)).t())


def log_softmax(logits, *, vocab_size, vocab_block):
    real = logits[:, :vocab_size]
    maximum = real.amax(-1)
    log_sum = math.log(_normaliser(_block_sums(real, maximum, vocab_block)))
    out = torch.full_like(logits, -torch.inf)
    out[:, :vocab_size] = (real - maximum[:, None]) - log_sum[:, None]
    return out


def shard_columns(width, vocab_size, tp):
    """Global id of this rank's column 0, and how many of its columns exist."""
    first = 0 if tp is None else torch.distributed.get_rank(tp.group) * width
    return first, min(max(vocab_size - first, 0), width)


def statistics(logits, *, vocab_size, vocab_block, tp=None):
    """(maximum [T], sum of exp(logits - maximum) [T]) over all ranks' shards."""
    width = logits.shape[1]
    real = logits[:, : shard_columns(width, vocab_size, tp)[1]]
    # A shard may hold padding only; its maximum must not decide.
    maximum = real.amax(-1) if real.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
    if tp is not None:
        maximum = all_gather(maximum, tp.group).amax(0)
    sums = _block_sums(real, maximum, vocab_block)
    if tp is not None:
        sums = torch.nn.functional.pad(sums, (0, -(-width // vocab_block) - sums.shape[1]))
        sums = all_gather(sums, tp.group).transpose(0, 1).flatten(1)
    return maximum, _normaliser(sums)


def token_gradient(grad, logits, tokens, maximum, total, *, first, real):
    """grad * (onehot - p) [T, V] fp32 of some columns of the vocabulary.

    Args:
        grad, maximum, total: [T] fp32; tokens: [T] int64, global ids.
        logits: [T, V] fp32, already divided by the temperature; ``first``: global id of their column 0; ``real``: how many exist.
    """
    out = torch.zeros_like(logits)
    for rows in _row_blocks(logits):
        p = torch.exp(logits[rows, :real] - maximum[rows, None]) / total[rows, None]
        out[rows, :real] = p * -grad[rows, None]
    local = tokens - first
    owned = ((local >= 0) & (local < real)).nonzero().squeeze(-1)
    out[owned, local[owned]] += grad[owned]
    return out


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, tokens, vocab_size, vocab_block, tp, keep):
        width = logits.shape[1]
        ctx.first, ctx.real = shard_columns(width, vocab_size, tp)
        local = tokens - ctx.first
        mine = (local >= 0) & (local < ctx.real)
        target = logits.gather(1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
        maximum, total = statistics(logits, vocab_size=vocab_size, vocab_block=vocab_block, tp=tp)
        if tp is not None:
            target = all_gather(target, tp.group).gather(0, (tokens // width).unsqueeze(0)).squeeze(0)
        ctx.save_for_backward(logits, tokens, maximum, total)
        if keep is not None:
            keep(maximum, total)
        return (target - maximum) - math.log(total)

    @staticmethod
    def backward(ctx, grad):
        return token_gradient(grad, *ctx.saved_tensors, first=ctx.first, real=ctx.real), None, None, None, None, None


def token_logprob(logits, tokens, *, vocab_size, vocab_block, tp=None, keep=None):
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise ContractError(f"logprob.token_logprob: token ids lie outside [0, {vocab_size}); mask ignored positions before the call")
    return _TokenLogprob.apply(logits, tokens.to(torch.int64), vocab_size, vocab_block, tp if group_size(tp) > 1 else None, keep)
