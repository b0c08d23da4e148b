"""Drawing a token. No logprob depends on how the draw is made; what is drawn must not depend on the batch."""

from isoexec.ops._core.registry import op


@op(
    "sampling.draw",
    cpu=".reference:draw",
    hazards=("exp of a vector tail differs from that of a full vector: a row's place in the batch would decide near-ties",),
)
def draw(logprobs, generators):
    """One token per row from exp(logprobs), by the exponential race argmax(p / e), e ~ Exp(1); ties go to the lowest id.

    A row's token depends on its logprobs and its generator's state alone, never on the rows beside it. One call takes one row of
    V exponentials from a row's generator.

    Args:
        logprobs: [T, V] fp32; -inf is never drawn.
        generators: T ``torch.Generator`` on the device of ``logprobs``, or None for a row whose token the caller discards.

    Returns:
        [T] int64.
    """
