"""Token embedding: a gather."""

from isoexec.ops._core.registry import op


@op("embedding.embedding", cpu=".reference:embedding", cuda=".triton:embedding", hazards=("a tensor-parallel sum would turn -0.0 into +0.0",))
def embedding(ids, weight):
    """Rows ``weight[ids]``.

    Args:
        ids: [T] int64, each in [0, V).
        weight: [V, D] bf16.

    Returns:
        [T, D] bf16, bit for bit the rows of ``weight``. Differentiable in ``weight``.
    """
