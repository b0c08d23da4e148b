"""Micro-batches: which sequences share one, where their logits lie."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from isoexec.contract import ContractError
from isoexec.runtimes.megatron import packing

PAIRS = [([1, 2, 3], [4, 5]), ([6], [7]), ([8, 9], []), ([10], [11, 12, 13])]


def test_groups_are_filled_in_order():
    assert packing.groups_of(PAIRS, 7) == [[0, 1], [2, 3]]
    assert packing.groups_of(PAIRS, 5) == [[0], [1, 2], [3]]
    assert packing.groups_of(PAIRS, 1) == [[0], [1], [2], [3]], "a sequence longer than a group stands alone"
    assert packing.groups_of([], 7) == []


@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 1], [2, 3, 3]], [[0, 1, 2, 3], []], [[0, 1, 2, 4]]])
def test_groups_hold_every_sequence_once(groups):
    with pytest.raises(ContractError, match="packing: expected groups that hold each of 4 sequences once"):
        packing.groups_of(PAIRS, groups)


def check_targets(batch, pairs):
    flat = batch.input_ids.flatten().tolist()
    expected = [token for i in batch.indices for token in pairs[i][1]]
    assert batch.targets.tolist() == expected
    # The logits at a row predict the token that follows it.
    assert [flat[row + 1] for row in batch.rows.tolist()] == expected
    assert batch.counts == [len(pairs[i][1]) for i in batch.indices]


def test_a_pack_holds_sequences_one_after_another():
    batch = packing.pack(PAIRS, [3, 0, 2], "cpu")
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 1, 2, 3, 4, 5, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]]
    assert batch.packed.cu_seqlens_q.tolist() == [0, 4, 9, 11] and batch.packed.max_seqlen_q == 5
    check_targets(batch, PAIRS)


def test_padding_of_a_pack_is_a_sequence_of_its_own():
    batch = packing.pack(PAIRS, [0, 1], "cpu", multiple_of=4)
    assert batch.input_ids.shape == (1, 8)
    assert batch.packed.cu_seqlens_q.tolist() == [0, 5, 7, 8]
    check_targets(batch, PAIRS)


def test_a_padded_batch_holds_sequences_beside_each_other():
    batch = packing.pad(PAIRS, [1, 0, 3], "cpu")
    assert batch.input_ids.tolist() == [[6, 7, 0, 0, 0], [1, 2, 3, 4, 5], [10, 11, 12, 13, 0]]
    assert batch.packed is None
    check_targets(batch, PAIRS)


def positions_of(packed):
    from isoexec.runtimes.megatron.modules import RopeTable

    class Config:
        sequence_parallel = False

    return RopeTable.get_rotary_seq_len(None, None, None, torch.zeros(5, 1, 2), Config, packed).tolist()


def test_positions_restart_with_every_sequence_also_after_an_empty_one():
    assert positions_of(packed_of(0, 0, 3, 3, 5, 5)) == [0, 1, 2, 0, 1]


def packed_of(*bounds, format="thd"):
    cu_seqlens = torch.tensor(bounds, dtype=torch.int64)
    return PackedSeqParams(qkv_format=format, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def test_bounds_lie_on_both_sides():
    found = packing.bounds_of(packed_of(0, 0, 3, 5, 5), 5, "cpu")
    assert found.cu_seqlens.tolist() == [0, 0, 3, 5, 5] and found.cu_seqlens.dtype == torch.int32
    assert found.on_host == (0, 0, 3, 5, 5) and found.longest == 3
    assert packing.bounds_of(None, 7, "cpu").on_host == (0, 7)
    with pytest.raises(ContractError, match="qkv_format: expected 'thd', found 'sbhd'"):
        packing.bounds_of(packed_of(0, 5, format="sbhd"), 5, "cpu")
    for bounds in ((0, 4), (0, 6), ()):
        with pytest.raises(ContractError, match="expected to end at the 5 tokens"):
            packing.bounds_of(packed_of(*bounds), 5, "cpu")


def test_a_pack_is_read_once_until_it_is_written():
    """Layers, and micro-batches that a pipeline has under way beside it, ask again; a captured step writes its bounds in place."""
    first, second = packed_of(0, 3, 5), packed_of(0, 1, 5)
    read = packing.bounds_of(first, 5, "cpu")
    assert packing.bounds_of(second, 5, "cpu").on_host == (0, 1, 5)
    assert packing.bounds_of(first, 5, "cpu") is read
    first.cu_seqlens_q[1] = 2
    assert packing.bounds_of(first, 5, "cpu").on_host == (0, 2, 5) and packing.bounds_of(first, 5, "cpu").longest == 3
    assert packing.bounds_of(packed_of(0, 3, 5), 5, "cpu") is not read, "another tensor is read by itself"
    with torch.inference_mode():
        kept = packed_of(0, 3, 5)
        assert packing.bounds_of(kept, 5, "cpu").on_host == (0, 3, 5)
        kept.cu_seqlens_q[1] = 4
        assert packing.bounds_of(kept, 5, "cpu").on_host == (0, 4, 5)


def test_a_micro_batch_reads_its_pack_anew_before_its_layers_ask():
    """What a collective or ``.data`` writes leaves no trace."""
    packed = packed_of(0, 3, 5)
    assert positions_of(packed) == [0, 1, 2, 0, 1] and packing.bounds_of(packed, 5, "cpu").on_host == (0, 3, 5)
    packed.cu_seqlens_q.data[1] = 1
    assert packing.bounds_of(packed, 5, "cpu").on_host == (0, 3, 5), "nothing to see, so nothing is read"
    assert positions_of(packed) == [0, 0, 1, 2, 3] and packing.bounds_of(packed, 5, "cpu").on_host == (0, 1, 5)
