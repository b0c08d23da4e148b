"""vLLM's server in a Ray actor, bound to its node's address, with the settings that a contract asks for."""

from __future__ import annotations

import os
import signal
import threading
from argparse import Namespace

import psutil
import torch
from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import VLLMServerActor

from isoexec.contract import Numerics, active_contract
from isoexec.contract.build import read_config
from isoexec.runtimes.skyrl.config import TrainConfig, uses_gpus
from isoexec.runtimes.skyrl.follow import end_with
from isoexec.runtimes.vllm import cache_size, graphs
from isoexec.runtimes.vllm.engine import register_model

EXTENSION = "isoexec.runtimes.skyrl.extension.EngineExtension"
EXECUTOR = "isoexec.runtimes.skyrl.executor.LoneExecutor"
_BLOCK = 32  # tokens
_CORE = "EngineCore"  # in the title that vLLM gives the process
#: What SkyRL's server allows in its own process and its children's: objects that are unpickled, which CUDA IPC handles need, and adapters
#: loaded on request.
_ALLOWED_BY_UPSTREAM = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA_UPDATING")


class Server(VLLMServerActor):
    """SkyRL's server; ``config`` stands for the command line."""

    def __init__(self, config: TrainConfig, *positional, **kwargs):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        super().__init__(engine_arguments(config), *positional, **kwargs)
        if hidden is not None and not uses_gpus():  # upstream lets the engine see every GPU
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden
        self._cli_args.host = self._ip  # upstream listens on every interface
        if not uses_gpus():
            for name in _ALLOWED_BY_UPSTREAM:
                os.environ.pop(name, None)
        if self._num_gpus_per_server == 1 and self._use_mp_backend:
            self._cli_args.distributed_executor_backend = EXECUTOR  # the worker lives in the engine's process: one import of vLLM less
        register_model(read_config(config.trainer.policy.model.path))
        self._ending = threading.Event()

    async def start(self):
        """As upstream. From then on this process ends with its engine cores: vLLM fails the requests that a core is computing, but a call
        that waits for a core's answer, such as the first request and every weight sync make, would wait for ever.
        """
        info = await super().start()
        cores = [child for child in psutil.Process().children(recursive=True) if _CORE in " ".join(child.cmdline())]
        if not cores:
            raise RuntimeError(f"the server is up, but none of its child processes has {_CORE} in its title, as vLLM's engine cores have")
        end_with(cores, self._ending)
        return info

    async def shutdown(self) -> None:
        """End the server and the engine processes that it started."""
        self._ending.set()
        children = psutil.Process().children(recursive=True)
        await super().shutdown()
        for child in children:
            try:
                os.kill(child.pid, signal.SIGTERM)
            except ProcessLookupError:
                pass


def engine_arguments(config: TrainConfig) -> Namespace:
    """vLLM's arguments; what ``engine_init_kwargs`` names is left as it is, and refused by the engine where a contract forbids it."""
    args = build_vllm_cli_args(config)
    model = read_config(config.trainer.policy.model.path)
    wanted = {
        "worker_extension_cls": EXTENSION,
        "trust_remote_code": False,
        "logprobs_mode": "processed_logprobs",
        "max_model_len": config.trainer.max_prompt_length + config.generator.sampling_params.max_generate_length,
        "uvicorn_log_level": "warning",
        "disable_uvicorn_access_log": True,
    }
    if model["architectures"][0].endswith("ForConditionalGeneration"):
        wanted["language_model_only"] = True
    if "linear_attention" in model.get("text_config", model).get("layer_types", ()):
        wanted["mamba_ssm_cache_dtype"] = "float32"
        if active_contract() is None and not uses_gpus() and torch.cpu._is_amx_tile_supported():
            wanted |= {"enable_prefix_caching": False, "enable_chunked_prefill": False}  # upstream has neither, and ends if asked
    if active_contract() is not None and not args.enforce_eager:
        wanted |= graphs.arguments(args.max_num_seqs)
    given = config.generator.inference_engine.engine_init_kwargs
    wanted = {name: value for name, value in wanted.items() if name not in given}
    vars(args).update(wanted)
    if not uses_gpus():
        vars(args).update({name: value for name, value in _cpu_arguments(args, model).items() if name not in given})
    return args


def _cpu_arguments(args: Namespace, model: dict) -> dict:
    contract = active_contract()
    block, blocks = cache_size.blocks(
        model, Numerics() if contract is None else contract.numerics, _BLOCK, None, args.max_num_seqs, args.max_model_len,
        bool(args.enable_prefix_caching),
    )  # fmt: skip
    return {
        "enable_sleep_mode": False,
        "weight_transfer_config": None,
        "block_size": block,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": 1 << 30,  # only checked against the machine's memory: the override decides
    }
