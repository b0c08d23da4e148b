"""Token logprobs from hidden states, a tile of the logits at a time: no [tokens, vocabulary] tensor, in either direction.

Forward takes blocks of rows through the public ops, so that a row has the bits that it has among all others. Backward computes the logits
twice more: by blocks of rows for the gradient of the hidden states, one product over the whole vocabulary each, and by blocks of the
vocabulary for that of the weight, one product over all rows each. Neither sums over blocks.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from isoexec.ops.collective.reference import group_size
from isoexec.ops.logprob import scale_by_temperature, token_logprob
from isoexec.ops.logprob.reference import shard_columns
from isoexec.ops.matmul import lm_head

#: Bytes of fp32 logits held at once; two such tiles exist while one is made from the other.
LOGIT_BYTES = 96 << 20
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
        [T] fp32. Differentiable in ``x`` and ``weight``; beside inputs and results it holds less than three times `LOGIT_BYTES`.
    """
    arguments = x, weight, tokens, temperature, dict(vocab_size=vocab_size, vocab_block=vocab_block, tp=tp if group_size(tp) > 1 else None)
    if x.shape[0] * weight.shape[0] * 4 <= LOGIT_BYTES:
        return _rows(*arguments, see)
    return _Tiles.apply(*arguments, see)


def _rows(x, weight, tokens, temperature, sizes, see=None):
    logits = scale_by_temperature(lm_head(x, weight), temperature)
    if see is not None:
        see(logits)
    return token_logprob(logits, tokens, **sizes)


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
    else:
        from isoexec.ops.logprob import triton as logprob
        from isoexec.ops.matmul import gpu as matmul
    return SimpleNamespace(logprob=logprob, matmul=matmul)


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, tokens, temperature, sizes, see):
        ctx.save_for_backward(x, weight, tokens, temperature)
        ctx.sizes = sizes
        tiles = _tiles(x.shape[0], weight.shape[0])
        return torch.cat([_rows(x[rows], weight, tokens[rows], _of(temperature, rows), sizes, see) for rows in tiles])

    @staticmethod
    def backward(ctx, grad):
        x, weight, tokens, temperature = ctx.saved_tensors
        backend, width = _backend(x.device), weight.shape[0]
        first, real = shard_columns(width, ctx.sizes["vocab_size"], ctx.sizes["tp"])

        def logits(rows, columns):
            y = backend.matmul.lm_head(x[rows], weight[columns])
            return backend.logprob.scale_by_temperature(y, _of(temperature, rows))

        def gradient(rows, columns, scaled, maximum, total):
            inside = min(max(real - columns.start, 0), columns.stop - columns.start)
            first_column = first + columns.start
            return backend.logprob.token_gradient(grad[rows], scaled, tokens[rows], maximum, total, first=first_column, real=inside)

        every_row, every_column = slice(0, x.shape[0]), slice(0, width)
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        maximum, total = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(2))
        for rows in _tiles(x.shape[0], width):
            scaled = logits(rows, every_column)
            maximum[rows], total[rows] = backend.logprob.statistics(scaled, **ctx.sizes)
            g = gradient(rows, every_column, scaled, maximum[rows], total[rows])
            del scaled  # two tiles at a time
            g = backend.logprob.scale_by_temperature(g, _of(temperature, rows))
            grad_x[rows] = backend.matmul.input_gradient(g, weight, x.dtype)
            del g
        for columns in _tiles(width, x.shape[0]) if ctx.needs_input_grad[1] else ():
            scaled = logits(every_row, columns)
            g = gradient(every_row, columns, scaled, maximum, total)
            del scaled
            g = backend.logprob.scale_by_temperature(g, temperature)
            grad_weight[columns] = backend.matmul.weight_gradient(g, x, weight.dtype)
            del g
        return grad_x, grad_weight, None, None, None, None
