"""Tensor and sequence parallelism over gloo: four processes, degrees 1, 2 and 4 (the checks are in tensor_parallel_ranks.py)."""

import tensor_parallel_ranks
import torch.multiprocessing


def test_every_degree_gives_the_same_bits(tmp_path):
    torch.multiprocessing.spawn(tensor_parallel_ranks.main, (str(tmp_path / "rendezvous"),), tensor_parallel_ranks.WORLD)
