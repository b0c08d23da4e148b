"""Ray actors that import a framework in their own process only.

SkyRL's driver imports vLLM's server and Megatron's worker to name their classes: half a minute of CPU time and a gigabyte that it never
uses. Here the driver names these classes, and the real ones are imported where the actor runs.
"""

from __future__ import annotations

import os
from argparse import Namespace

import ray
from skyrl.train.utils.ray_logging import redirect_actor_output_to_file

from isoexec.runtimes.skyrl.config import HIDE_VARIABLE, TrainConfig, uses_gpus


def _begin() -> None:
    """First of all in an actor: its output goes to the run's log, and it sees the devices of the run."""
    redirect_actor_output_to_file()
    if os.environ.get(HIDE_VARIABLE):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class EngineActor:
    """SkyRL's ``ServerActorProtocol`` around :class:`isoexec.runtimes.skyrl.server.Server`."""

    @staticmethod
    def compute_num_gpus_per_server(args: Namespace) -> int:
        """Processes that one server spans."""
        return args.tensor_parallel_size * args.pipeline_parallel_size

    @staticmethod
    def prepare_server_kwargs(group, first_bundle: int, processes: int, *, _gpu_ids=None, **kwargs) -> dict:
        """Arguments that depend on the placement: the devices that a server's worker processes see."""
        if kwargs.get("distributed_executor_backend") == "mp" and _gpu_ids is not None and uses_gpus():
            kwargs["mp_cuda_visible_devices"] = ",".join(map(str, _gpu_ids))
        return kwargs

    def __init__(self, args: Namespace, *positional, **kwargs):
        _begin()
        from isoexec.runtimes.skyrl.server import Server

        self._server = Server(args.config, *positional, **kwargs)

    def get_server_info(self):
        return self._server.get_server_info()

    def get_dp_info(self):
        return self._server.get_dp_info()

    async def start(self):
        return await self._server.start()

    async def shutdown(self) -> None:
        await self._server.shutdown()


def engine_request(config: TrainConfig) -> Namespace:
    """What SkyRL's ``ServerGroup`` hands to each :class:`EngineActor`; the actor turns it into vLLM's arguments."""
    engine = config.generator.inference_engine
    return Namespace(
        config=config, tensor_parallel_size=engine.tensor_parallel_size, pipeline_parallel_size=engine.pipeline_parallel_size
    )


def _delegate(name: str):
    def method(self, *args, **kwargs):
        return getattr(self._worker, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _delegate_async(name: str):
    async def method(self, *args, **kwargs):
        return await getattr(self._worker, name)(*args, **kwargs)

    method.__name__ = name
    return method


#: What SkyRL's actor group and dispatch call on a policy worker.
_METHODS = (
    "_set_pad_token_id", "backload_to_gpu", "dump_profiler_summary", "empty_cache", "forward", "forward_backward", "get_cuda_memory",
    "get_lr", "get_master_addr_port", "get_mesh_rank", "get_ray_node_id", "init_model", "init_worker_process_group", "load_checkpoint",
    "offload_to_cpu", "optim_step", "profile_step", "save_checkpoint", "save_hf_model", "save_memory_snapshot", "set_algorithm_config",
    "set_lr", "start_profile", "stop_profile",
)  # fmt: skip
_ASYNC_METHODS = ("broadcast_to_inference_engines", "init_weight_sync_state")


class _PolicyActor:
    """SkyRL's policy worker protocol around :class:`isoexec.runtimes.skyrl.worker.PolicyWorker`."""

    def __init__(self, **kwargs):
        _begin()
        from isoexec.runtimes.skyrl.worker import PolicyWorker

        self._worker = PolicyWorker(**kwargs)


for _name in _METHODS:
    setattr(_PolicyActor, _name, _delegate(_name))
for _name in _ASYNC_METHODS:
    setattr(_PolicyActor, _name, _delegate_async(_name))

PolicyActor = ray.remote(num_gpus=1)(_PolicyActor)
