"""Log-softmax over the vocabulary and the logprob of a token, from fp32 logits.

The maximum is exact; exp is summed in blocks of ``vocab_block`` entries (row sum), and block sums are added by the balanced tree over the
next power of two of the whole vocabulary, absent blocks being +0.0. Rows at and beyond ``vocab_size`` are excluded by selection.
logprob = (x - max) - log(sum).
"""

from isoexec.ops._core.registry import op
from isoexec.ops.logprob.checks import check_rows, check_scale, check_tokens

_HAZARDS = ("padded vocabulary rows must not enter the sum", "temperature is one fp32 op on both sides")


@op(
    "logprob.scale_by_temperature",
    cpu=".reference:scale_by_temperature", cuda=".triton:scale_by_temperature",
    hazards=_HAZARDS, check=check_scale,
)  # fmt: skip
def scale_by_temperature(logits, temperature):
    """logits / T, true division in fp32.

    Args:
        logits: [T, V] fp32.
        temperature: fp32 scalar tensor, or [T] fp32 with one value per row.

    Returns:
        [T, V] fp32. Differentiable in ``logits``.
    """


@op("logprob.log_softmax", cpu=".reference:log_softmax", cuda=".triton:log_softmax", hazards=_HAZARDS, check=check_rows)
def log_softmax(logits, *, vocab_size, vocab_block):
    """Log-probabilities of every vocabulary entry.

    Args:
        logits: [T, V] fp32, already divided by the temperature; V >= vocab_size.
        vocab_size: entries that exist; later ones get -inf.
        vocab_block: entries per partial sum.

    Returns:
        [T, V] fp32.
    """


@op("logprob.token_logprob", cpu=".reference:token_logprob", cuda=".triton:token_logprob", hazards=_HAZARDS, check=check_tokens)
def token_logprob(logits, tokens, *, vocab_size, vocab_block, tp=None, keep=None):
    """Logprob of one token per row; bit for bit the entry that :func:`log_softmax` gives, without holding the rows.

    Args:
        logits: [T, V / n] fp32, this rank's vocabulary shard, already divided by the temperature.
        tokens: [T] int64, global ids.
        vocab_size: entries that exist (global).
        vocab_block: entries per partial sum; V / n must be a multiple of it when n > 1.
        tp: :class:`isoexec.ops.collective.TensorParallel` or None.
        keep: function that is given each row's maximum and sum of exp(logits - maximum), [T] fp32 each, over all ranks' shards: what a
            gradient that is computed elsewhere needs.

    Returns:
        [T] fp32. Differentiable in ``logits``.
    """
