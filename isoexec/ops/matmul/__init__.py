"""Matrix products: column-parallel (one leaf), row-parallel (G leaves and a tree), vocabulary head (fp32 logits)."""

from functools import partial

from isoexec.ops._core.registry import op
from isoexec.ops.matmul.checks import check_operands, check_row_parallel

_SHAPES = ("a row's bits must not depend on how many rows, or which, are computed beside it",)


@op("matmul.linear", cpu=".reference:linear", cuda=".gpu:linear", hazards=_SHAPES, check=partial(check_operands, "matmul.linear"))
def linear(x, weight, bias=None):
    """Column-parallel or replicated linear layer: one leaf, fp32 accumulation in ascending K, one rounding.

    An output column's bits depend on its row of ``weight`` alone, so stacked (q|k|v, gate|up), interleaved and sharded
    weights give the same bits.

    Args:
        x: [..., T, K] bf16.
        weight: [N, K] bf16.
        bias: [N] bf16 or None; added in fp32 before the rounding.

    Returns:
        [..., N] bf16. Differentiable.
    """


@op(
    "matmul.row_parallel_linear",
    cpu=".reference:row_parallel_linear", cuda=".gpu:row_parallel_linear",
    hazards=_SHAPES, check=check_row_parallel,
)  # fmt: skip
def row_parallel_linear(x, weight, *, leaves, tp=None, bias=None):
    """Row-parallel linear layer: K cut in ``leaves`` equal parts, fp32 partials added by the balanced tree, one rounding.

    Args:
        x: [..., K / n] bf16, this rank's part of K (n = size of ``tp``, 1 when None).
        weight: [N, K / n] bf16.
        leaves: G of the contract, a power of two; K must be a multiple of 16 * G and n must divide G.
        tp: :class:`isoexec.ops.collective.TensorParallel` or None.
        bias: [N] bf16 or None; added in fp32 after the tree.

    Returns:
        [..., N] bf16 (with sequence parallelism: this rank's rows). The same bits for every n. Differentiable.

    Raises:
        ContractError: K or n does not fit ``leaves``.
    """


@op(
    "matmul.lm_head",
    cpu=".reference:lm_head", cuda=".gpu:lm_head",
    hazards=(*_SHAPES, "logits rounded to bf16 lose what the softmax needs"), check=partial(check_operands, "matmul.lm_head"),
)  # fmt: skip
def lm_head(x, weight):
    """Vocabulary head: bf16 operands, fp32 accumulation, fp32 logits that are never rounded to bf16.

    Args:
        x: [T, D] bf16.
        weight: [V, D] bf16 (V may be one tensor-parallel shard).

    Returns:
        [T, V] fp32. Differentiable.
    """
