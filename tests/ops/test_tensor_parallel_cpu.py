"""Tensor and sequence parallelism over gloo: four processes, degrees 1, 2 and 4 (the checks are in tensor_parallel_ranks.py)."""

import multiprocessing

import tensor_parallel_ranks
import torch.multiprocessing


def test_every_degree_gives_the_same_bits(tmp_path):
    # A fork server imports torch once, in a process without threads, instead of once a rank.
    multiprocessing.set_forkserver_preload([tensor_parallel_ranks.__name__])
    torch.multiprocessing.start_processes(
        tensor_parallel_ranks.main,
        (str(tmp_path / "rendezvous"),),
        nprocs=tensor_parallel_ranks.WORLD,
        start_method="forkserver",
    )
