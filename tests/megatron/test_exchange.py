"""What ranks exchange is text and tensors: equal on every rank, and nothing of it is unpickled."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from isoexec.runtimes.megatron.exchange import gather_texts, share_tensors

RANKS = 2


def _refuse(event: str, arguments) -> None:
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickled {arguments}")


def held(rank: int) -> dict[str, torch.Tensor]:
    """Of a rank: something of its own, and something that both hold, with other values."""
    bits = torch.arange(6, dtype=torch.int16) + 16256 * (rank + 1) // 2
    return {
        f"only {rank}": bits.view(torch.bfloat16).view(2, 3),
        "both": torch.full((3,), float(rank)),
        f"empty {rank}": torch.empty(0, 4),
        f"one {rank}": torch.tensor(1 / 3 + rank),
    }


def _exchange(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    group = dist.new_group([0, 1])
    sys.addaudithook(_refuse)
    texts = ["", "ü" * 7 + "\0"]
    assert gather_texts(texts[rank]) == texts and gather_texts(texts[rank], group) == texts
    assert gather_texts("") == ["", ""]
    found = share_tensors(held(rank), group)
    wanted = held(1) | held(0)  # of what both hold, the first's
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name
    with pytest.raises(RuntimeError, match="unpickled"):  # the hook sees what torch's own exchange does
        dist.all_gather_object([None] * RANKS, torch.device("cpu"))
    dist.barrier()  # a rank that has done must not close the connections of one that has not
    dist.destroy_process_group()


def test_ranks_exchange_text_and_tensors_and_unpickle_nothing(tmp_path):
    processes.spawn(_exchange, (str(tmp_path / "store"),), nprocs=RANKS)


def test_one_rank_has_what_it_gave():
    assert gather_texts("alone") == ["alone"]
