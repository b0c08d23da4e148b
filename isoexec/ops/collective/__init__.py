"""Collectives of the logprob path: they move bytes; sums are taken by the tree of docs/schedule.md, never in rank order."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from isoexec.ops._core.registry import op


@dataclass(frozen=True)
class TensorParallel:
    """A tensor-parallel group and whether activations between blocks are sharded by sequence.

    Attributes:
        group: process group; rank r of n owns leaves [r * G / n, (r + 1) * G / n) of every row-parallel product.
        sequence_parallel: inputs of column-parallel products are gathered over tokens, outputs of row-parallel ones
            keep this rank's tokens.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool = False


@op("collective.column_parallel_input", cpu=".reference:column_parallel_input", cuda=".reference:column_parallel_input")
def column_parallel_input(x, *, tp=None):
    """Input of a column-parallel product.

    Forward: ``x`` itself, or with sequence parallelism the gather of all ranks' tokens. Backward: the sum of the ranks' gradients (with sequence
    parallelism this rank's tokens of it), by the balanced tree over ranks.

    Args:
        x: [T, D] (with sequence parallelism [T / n, D]) bf16.
        tp: :class:`TensorParallel` or None (identity).

    Returns:
        [T, D] bf16.
    """


@op("collective.rows_of_owners", cpu=".reference:rows_of_owners", cuda=".reference:rows_of_owners", hazards=("adding zeros for absent rows would turn -0.0 into +0.0",))
def rows_of_owners(rows, owner, *, tp):
    """Each token's row from the rank that owns it (a vocabulary-parallel embedding); what other ranks hold there is not read.

    Backward: a rank gets the gradients of the rows it owns, +0.0 elsewhere.

    Args:
        rows: [T, D] bf16, this rank's candidates for every token.
        owner: [T] int64, rank that owns each token's row.
        tp: :class:`TensorParallel`.

    Returns:
        [T, D] bf16 (with sequence parallelism this rank's tokens, [T / n, D]).
    """
