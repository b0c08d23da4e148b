"""Megatron's process groups, on gloo; with one process, over its own memory and the loopback interface only."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from isoexec.contract import ContractError


class ProcessGroups:
    """Groups for given degrees; made when there are none, joined when they fit, ended by who made them.

    Args:
        tensor_parallel_size, pipeline_parallel_size, expert_parallel_size: degrees; an expert is never cut. More than one process needs
            ``torch.distributed`` initialised by the launcher.
        seed: of Megatron's random number tracker.
    """

    def __init__(
        self, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, seed: int = 0, expert_parallel_size: int = 1
    ):
        self._began_distributed = not dist.is_initialized()
        if self._began_distributed:
            self._begin_alone()
        self._began_parallel = not parallel_state.model_parallel_is_initialized()
        if self._began_parallel:
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=tensor_parallel_size,
                pipeline_model_parallel_size=pipeline_parallel_size,
                expert_model_parallel_size=expert_parallel_size,
                expert_tensor_parallel_size=1,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        self.collection = ProcessGroupCollection.use_mpu_process_groups()
        for name, wanted, group in (
            ("tensor", tensor_parallel_size, self.collection.tp),
            ("pipeline", pipeline_parallel_size, self.collection.pp),
            ("expert", expert_parallel_size, self.collection.ep),
        ):
            if group.size() != wanted:
                raise ContractError(
                    f"{name}-parallel degree: expected {wanted}, found groups of {group.size()} that this process made before; close "
                    "the trainer that made them first"
                )

    def _begin_alone(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo listens, even alone
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def close(self) -> None:
        """End the groups that this object made. A gloo group has a thread that wakes a hundred times a second until nothing refers to it: a
        caller that goes on drops what it made of the groups, and collects the cycles of its model."""
        self.collection = None
        if self._began_parallel:
            parallel_state.destroy_model_parallel()
        if self._began_distributed:
            dist.destroy_process_group()
        self._began_parallel = self._began_distributed = False
