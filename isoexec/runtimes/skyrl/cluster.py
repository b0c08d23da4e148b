"""Ray: a cluster on this machine or one to join, the environment of its actors, and bundles without GPUs."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
from collections.abc import Callable
from pathlib import Path

import ray
import torch
from ray._private import worker
from ray.util.placement_group import placement_group, placement_group_table
from skyrl.train.utils.utils import ResolvedPlacementGroup, get_ray_pg_ready_with_timeout, prepare_runtime_environment

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.runtimes.skyrl.address import answering
from isoexec.runtimes.skyrl.config import HIDE_VARIABLE, SYNC_VARIABLE, ConfigError, TrainConfig, uses_gpus

_OBJECT_STORE = 256 << 20  # bytes; a batch of prompts and logprobs is small
_TIMEOUT = 180  # seconds for placement
#: At this address, and at no other of the loopback interface, Ray's processes listen there alone.
_LOOPBACK = "127.0.0.1"

_DEVICES = "CUDA_VISIBLE_DEVICES"
#: Environment of every actor on the CPU: one thread each, nothing that compiles, no GPU though Ray counts some.
_CPU_ENVIRONMENT = {
    HIDE_VARIABLE: "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the engine hold its worker: a process less that imports vLLM
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
_ENVIRONMENT |= {"LOG_LEVEL": "INFO", "LOGURU_LEVEL": "INFO"}  # of the run's log, whatever the driver shows


def actor_environment(config: TrainConfig, contract: Path | None) -> dict[str, str]:
    """Environment variables of every actor of the run."""
    variables = dict(_ENVIRONMENT)
    if uses_gpus():
        variables |= prepare_runtime_environment(config)
    else:
        variables |= _CPU_ENVIRONMENT
    log = Path(config.trainer.log_path) / f"infra-{datetime.datetime.now():%y%m%d_%H%M%S}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    variables |= {"SKYRL_LOG_FILE": str(log), SYNC_VARIABLE: config.isoexec.sync_folder}
    if contract is not None:
        variables[CONTRACT_VARIABLE] = str(contract)
    return variables


def start(config: TrainConfig, variables: dict[str, str]) -> Callable[[], None]:
    """Start Ray on this machine, on its loopback interface, or join ``isoexec.ray_address``.

    Where there is no GPU, Ray's ``GPU`` resource counts processes: SkyRL asks for one per worker and engine rank.

    Returns:
        What ends it again, or leaves it.

    Raises:
        ConfigError: the cluster does not answer, or lacks what the placement needs.
    """
    runtime = {"env_vars": variables}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if config.isoexec.ray_address is not None:
        stop = _join(config.isoexec.ray_address, runtime)
    elif uses_gpus():
        stop = _start_here(torch.cuda.device_count(), os.cpu_count(), None, runtime)
    else:
        processes = _processes(config)
        with _counting_processes():
            stop = _start_here(processes, 2 * processes + 2, _OBJECT_STORE, runtime)
    wanted = _processes(config)
    found = ray.cluster_resources().get("GPU", 0)
    if found < wanted:
        stop()
        raise ConfigError(
            f"placement: expected {wanted} GPUs in the Ray cluster, found {found:g}; use fewer, or (where there are none) start Ray's "
            "nodes with --num-gpus to count processes"
        )
    return stop


def _join(address: str, runtime: dict) -> Callable[[], None]:
    address = answering(address)
    try:
        ray.init(address=address, runtime_env=runtime, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"isoexec.ray_address: no Ray cluster at {address!r}: {error}") from error
    return ray.shutdown


def _start_here(gpus: int, cpus: int, object_store: int | None, runtime: dict) -> Callable[[], None]:
    from isoexec.runtimes.skyrl.node import LocalNode

    node = LocalNode(_LOOPBACK, gpus, cpus, object_store)
    # As Ray does with a node that it starts itself: to a driver that has none it takes this address for a mistake.
    worker._global_node = node

    def stop() -> None:
        ray.shutdown()
        node.stop()

    try:
        ray.init(address=node.address, runtime_env=runtime, logging_level=logging.WARNING, _node_ip_address=_LOOPBACK)
    except BaseException:
        stop()
        raise
    return stop


@contextlib.contextmanager
def _counting_processes():
    """Ray refuses to count GPUs where the environment hides them all."""
    hidden = os.environ.pop(_DEVICES, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[_DEVICES] = hidden


def _processes(config: TrainConfig) -> int:
    """Bundles that policy and engines need."""
    placement, engines = config.trainer.placement, engine_processes(config)
    policy = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    return max(policy, engines) if placement.colocate_all else policy + engines


def engine_processes(config: TrainConfig) -> int:
    """Ranks of all engines."""
    engine = config.generator.inference_engine
    return engine.num_engines * engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size


class ProcessPlacement(ResolvedPlacementGroup):
    """Bundles in Ray's order. SkyRL's probing actors learn GPU ids; without GPUs there are none to learn."""

    def _get_bundle_placement(self):
        nodes = placement_group_table(self.pg)["bundles_to_node_id"]
        return sorted(((bundle, node, bundle) for bundle, node in nodes.items()), key=lambda entry: (entry[1], entry[2]))


def placement(bundles: int) -> ResolvedPlacementGroup:
    """A placement group of ``bundles`` single-process bundles, ready."""
    group = placement_group([{"GPU": 1, "CPU": 1}] * bundles, strategy="PACK")
    get_ray_pg_ready_with_timeout(group, timeout=_TIMEOUT)
    return ResolvedPlacementGroup(group) if uses_gpus() else ProcessPlacement(group)
