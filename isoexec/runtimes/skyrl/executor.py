"""vLLM's executor of one process, which meets nobody and so listens nowhere."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from vllm.v1.executor.uniproc_executor import UniProcExecutor

_SCHEME = "isoexec-alone"


def _meet(url: str, **unused) -> Iterator[tuple[dist.Store, int, int]]:
    """Store, rank and size of a group of this process alone."""
    yield dist.HashStore(), 0, 1


dist.register_rendezvous_handler(_SCHEME, _meet)


class LoneExecutor(UniProcExecutor):
    """Upstream's, whose process group has its store in memory: upstream's listens over TCP, on every interface."""

    def _distributed_args(self) -> tuple[str, int, int]:
        _, rank, local_rank = super()._distributed_args()
        return f"{_SCHEME}://", rank, local_rank
