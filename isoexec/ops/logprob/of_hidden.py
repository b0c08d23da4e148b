"""Token logprobs from hidden states, a tile of the logits at a time: no [tokens, vocabulary] tensor, in either direction.

Forward takes blocks of rows through the public ops, so that a row has the bits that it has among all others. Backward computes the logits
again, by blocks of the vocabulary. The gradient of the hidden states is their sum, in fp32, of so many rows as `SUM_BYTES` hold. Where those are
all, the weight's comes out of the same tiles; else it takes another pass, by blocks of the vocabulary of all rows.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from isoexec.ops._core import registry
from isoexec.ops.collective.reference import group_size
from isoexec.ops.logprob import scale_by_temperature, token_logprob
from isoexec.ops.logprob.reference import shard_columns
from isoexec.ops.matmul import lm_head

#: Bytes of fp32 logits held at once; two such tiles exist while one is made from the other.
LOGIT_BYTES = 96 << 20
#: Bytes of the fp32 gradient of hidden states that is summed at once.
SUM_BYTES = 32 << 20
_GRAIN = 32  # rows and columns of a tile are multiples


def of_hidden(x, weight, tokens, temperature, *, vocab_size, vocab_block, tp=None, see=None):
    """Logprob of one token per row: bit for bit ``token_logprob(scale_by_temperature(lm_head(x, weight), temperature), tokens)``.

    Args:
        x: [T, D] bf16.
        weight: [V / n, D] bf16, this rank's vocabulary shard.
        tokens: [T] int64, global ids.
        temperature: fp32 scalar tensor, or [T] fp32.
        vocab_size, vocab_block, tp: as in :func:`isoexec.ops.logprob.token_logprob`.
        see: function that is shown each tile of the rows' logits, [t, V / n] fp32, divided by the temperature, in order, while it is held.

    Returns:
        [T] fp32. Differentiable in ``x`` and ``weight``; beside inputs and results it holds less than twice `LOGIT_BYTES` and `SUM_BYTES`.
    """
    arguments = x, weight, tokens, temperature, dict(vocab_size=vocab_size, vocab_block=vocab_block, tp=tp if group_size(tp) > 1 else None)
    if x.shape[0] * weight.shape[0] * 4 <= LOGIT_BYTES:
        return _rows(*arguments, see)
    return _Tiles.apply(*arguments, see, torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def _rows(x, weight, tokens, temperature, sizes, see=None, keep=None):
    logits = scale_by_temperature(lm_head(x, weight), temperature)
    if see is not None:
        see(logits)
    return token_logprob(logits, tokens, keep=keep, **sizes)


def _tiles(count: int, other: int) -> list[slice]:
    """Slices of ``count`` rows (columns) whose logits against ``other`` columns (rows) fit."""
    step = max(LOGIT_BYTES // (4 * other) // _GRAIN, 1) * _GRAIN
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _of(temperature, rows: slice):
    return temperature[rows] if temperature.dim() and len(temperature) > 1 else temperature


def _backend(device: torch.device):
    """Implementations that backward calls; it computes nothing that reaches a logprob."""
    if device.type == "cpu":
        from isoexec.ops.logprob import reference as logprob
        from isoexec.ops.matmul import reference as matmul

        return SimpleNamespace(logprob=logprob, matmul=matmul, operand=lambda g, _: g, partial_sum=lambda g, weight: g @ weight.float())
    from isoexec.ops.logprob import triton as logprob
    from isoexec.ops.matmul import gpu as matmul

    partial_sum = lambda g, weight: torch.mm(g, weight, out_dtype=torch.float32)  # noqa: E731
    return SimpleNamespace(logprob=logprob, matmul=matmul, operand=torch.Tensor.to, partial_sum=partial_sum)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, tokens, temperature, sizes, see, wanted):
        """``wanted``: a gradient, for which each row's maximum and sum are kept."""
        statistics = []
        keep = (lambda *found: statistics.append(found)) if wanted else None
        tiles = _tiles(x.shape[0], weight.shape[0])
        logprobs = [_rows(x[rows], weight, tokens[rows], _of(temperature, rows), sizes, see, keep) for rows in tiles]
        with registry.beyond_logprob():
            ctx.save_for_backward(x, weight, tokens, temperature, *(torch.cat(part) for part in zip(*statistics)))
        ctx.sizes = sizes
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx, grad):
        x, weight, tokens, temperature, maximum, total = ctx.saved_tensors
        backend, (count, width), wanted = _backend(x.device), (x.shape[0], weight.shape[0]), ctx.needs_input_grad
        first, real = shard_columns(width, ctx.sizes["vocab_size"], ctx.sizes["tp"])
        grad = grad / temperature  # a row's gradient is linear in it

        def tile(rows, columns):
            """Gradient of the logits, before the temperature: what both products take."""
            y = backend.matmul.lm_head(x[rows], weight[columns])
            y = backend.logprob.scale_by_temperature(y, _of(temperature, rows))
            inside = min(max(real - columns.start, 0), columns.stop - columns.start)
            y = backend.logprob.token_gradient(
                grad[rows], y, tokens[rows], maximum[rows], total[rows], first=first + columns.start, real=inside
            )
            return backend.operand(y, weight.dtype)

        grad_x, grad_weight = (torch.empty_like(leaf) if needed else None for leaf, needed in zip((x, weight), wanted))
        step = max(SUM_BYTES // (4 * x.shape[1]), 1)
        one_block = count <= step
        for rows in (slice(i, min(i + step, count)) for i in range(0, count, step)) if one_block or wanted[0] else ():
            sums = torch.zeros(rows.stop - rows.start, x.shape[1], dtype=torch.float32, device=x.device)
            for columns in _tiles(width, rows.stop - rows.start):
                y = tile(rows, columns)
                if wanted[0]:
                    sums += backend.partial_sum(y, weight[columns])
                if wanted[1] and one_block:
                    grad_weight[columns] = backend.matmul.weight_gradient(y, x, weight.dtype)
                del y
            if wanted[0]:
                grad_x[rows] = sums
        for columns in _tiles(width, count) if wanted[1] and not one_block else ():
            grad_weight[columns] = backend.matmul.weight_gradient(tile(slice(0, count), columns), x, weight.dtype)
        return grad_x, grad_weight, None, None, None, None, None
