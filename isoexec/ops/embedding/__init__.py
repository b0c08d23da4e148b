"""Token embedding: a gather."""

from isoexec.ops._core.expect import BF16, IDS, tensor
from isoexec.ops._core.registry import op


def _check(ids, weight) -> None:
    tensor("embedding.embedding", "ids", ids, IDS, "T")
    tensor("embedding.embedding", "weight", weight, BF16, "V", "D")


@op(
    "embedding.embedding",
    cpu=".reference:embedding", cuda=".triton:embedding",
    hazards=("a tensor-parallel sum would turn -0.0 into +0.0",), check=_check,
)  # fmt: skip
def embedding(ids, weight):
    """Rows ``weight[ids]``.

    Args:
        ids: [T] int64 or int32, each in [0, V): one that is not is refused on a CPU; a GPU stops, and says so at the next synchronisation.
        weight: [V, D] bf16.

    Returns:
        [T, D] bf16, bit for bit the rows of ``weight``. Differentiable in ``weight``.
    """
