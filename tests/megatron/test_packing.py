"""Micro-batches: which sequences share one, where their logits lie."""

from __future__ import annotations

import pytest

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


def test_positions_restart_with_every_sequence_also_after_an_empty_one():
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from isoexec.runtimes.megatron.modules import RopeTable, cu_seqlens

    bounds = torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)

    class Config:
        sequence_parallel = False

    positions = RopeTable.get_rotary_seq_len(None, None, None, torch.zeros(5, 1, 2), Config, packed)
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert cu_seqlens(packed, 5).tolist() == bounds.tolist()
    with pytest.raises(ContractError, match="qkv_format: expected 'thd', found 'sbhd'"):
        cu_seqlens(PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=bounds), 5)
