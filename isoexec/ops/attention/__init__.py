"""Causal grouped-query attention, packed (trainer, prefill) and paged (chunked prefill, decode): one schedule.

Online softmax in fp32 over blocks of ``kv_block`` keys counted from position 0 of the sequence, ascending; the probabilities are
rounded to bf16 for the product with V while the row sum takes them unrounded; one rounding of the output.
"""

from isoexec.ops._core.registry import op
from isoexec.ops.attention.checks import check_paged, check_varlen, check_write_cache

_HAZARDS = (
    "a page, a chunk boundary or a neighbour in the pack must not move a block boundary",
    "masked keys are selected away, not multiplied by zero: 0 * NaN is NaN",
)


@op("attention.varlen", cpu=".reference:varlen", cuda=".gpu:varlen", hazards=_HAZARDS, check=check_varlen)
def varlen(q, k, v, cu_seqlens, *, scale, kv_block, longest=None):
    """Causal attention over packed sequences.

    Args:
        q: [T, H, K] bf16.
        k, v: [T, G, K] bf16, G dividing H; query head h reads key head h // (H / G).
        cu_seqlens: [B + 1] int32, ascending from 0 to T; repeated entries are empty sequences.
        scale: float, factor of the scores.
        kv_block: int, keys per online-softmax step.
        longest: int, an upper bound of the lengths where the caller knows one; saves work, moves no bit.

    Returns:
        [T, H, K] bf16. Differentiable in q, k, v.
    """


@op("attention.paged", cpu=".reference:paged", cuda=".gpu:paged", hazards=_HAZARDS, check=check_paged)
def paged(q, key_cache, value_cache, block_table, seq_lens, query_start_loc, *, scale, kv_block, longest=None):
    """Causal attention of new tokens against a paged cache that already holds them (see :func:`write_cache`).

    Args:
        q: [T, H, K] bf16, the new tokens of B sequences, packed.
        key_cache, value_cache: [pages, page_size, G, K] bf16 (any strides).
        block_table: [B, max_pages] int32.
        seq_lens: [B] int32, tokens of each sequence including the new ones.
        query_start_loc: [B + 1] int32; the new tokens are the last of their sequence.
        scale, kv_block: as in :func:`varlen`; longest: bound of the numbers of new tokens.

    Returns:
        [T, H, K] bf16, the same bits as :func:`varlen` gives on the whole sequences.
    """


@op("attention.write_cache", cpu=".reference:write_cache", cuda=".gpu:write_cache", check=check_write_cache)
def write_cache(k, v, key_cache, value_cache, slot_mapping):
    """Store new keys and values in the paged cache, in place.

    Args:
        k, v: [T, G, K] bf16.
        key_cache, value_cache: [pages, page_size, G, K] bf16.
        slot_mapping: [T] int64, page * page_size + offset; -1 stores nothing.
    """
