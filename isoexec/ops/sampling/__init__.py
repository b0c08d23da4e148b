"""Drawing a token. No logprob depends on how the draw is made; what is drawn must not depend on the batch."""

from isoexec.ops._core.registry import op
from isoexec.ops.sampling.checks import check_draw, check_logits, check_temperature


@op(
    "sampling.draw",
    cpu=".reference:draw", cuda=".triton:draw",
    hazards=("exp of a vector tail differs from that of a full vector: a row's place in the batch would decide near-ties",),
    check=check_draw,
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


@op(
    "sampling.split_greedy",
    cpu=".reference:split_greedy", cuda=".reference:split_greedy",
    hazards=("logits over a temperature of 0 are NaN or infinite, and NaN is what a row of a mixed batch would then draw from",),
    check=check_temperature,
)
def split_greedy(temperature):
    """Which rows are greedy, and a temperature that all rows can be divided by.

    Args:
        temperature: [T] fp32; a row below 1e-5 is greedy.

    Returns:
        (greedy [T] bool, temperature [T] fp32, 1 where greedy).
    """


@op("sampling.first_maximum", cpu=".reference:first_maximum", cuda=".triton:first_maximum", check=check_logits)
def first_maximum(logits):
    """Lowest id among the largest logits of each row: what greedy sampling takes.

    Args:
        logits: [T, V] fp32.

    Returns:
        [T] int64.
    """
