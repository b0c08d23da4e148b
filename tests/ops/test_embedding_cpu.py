"""Token embedding of the CPU backend."""

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import embedding
from op_checks import bf16_values, gradients_close, same_bits


def test_rows_come_out_bit_for_bit():
    weight = bf16_values(50, 24).bfloat16()
    weight[7] = -0.0
    weight[8] = 2.0**-133
    ids = torch.tensor([7, 8, 7, 0, 49], dtype=torch.int64)
    same_bits(embedding.embedding(ids, weight), weight[ids], "rows")
    assert torch.signbit(embedding.embedding(ids, weight)[0]).all()


def test_an_id_outside_the_vocabulary_is_an_error():
    for ids in ([0, 5], [-1, 4]):
        with pytest.raises(ContractError, match="embedding.embedding: ids: expected 0 to 4, found"):
            embedding.embedding(torch.tensor(ids), torch.zeros(5, 2, dtype=torch.bfloat16))


def test_repeated_ids_sum_their_gradients():
    ids = torch.tensor([3, 1, 3, 3, 0])
    gradients_close(lambda w: embedding.embedding(ids, w), lambda w: w[ids], (bf16_values(6, 8).bfloat16(),))


def test_a_frequent_token_is_summed_in_fp32():
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    embedding.embedding(torch.zeros(1000, dtype=torch.int64), weight).sum().backward()
    assert weight.grad[0].item() == 1000.0  # bf16 additions of 1 would stop at 256
