"""SkyRL's Megatron policy worker on isoexec's model, without Megatron-Bridge; on the CPU with gloo where there is no GPU."""

from __future__ import annotations

import datetime
import os
import shutil
from ctypes.util import find_library
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.device import device_type
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase
from skyrl.env_vars import SKYRL_WORKER_NCCL_TIMEOUT_IN_S
from skyrl.train.config.config import get_config_as_dict
from skyrl.utils.tok import get_tokenizer
from transformers import AutoConfig

from isoexec.contract import ContractError, active_contract
from isoexec.ops._core.digest import PendingDigests
from isoexec.runtimes.megatron import model as models
from isoexec.runtimes.megatron.exchange import CPU
from isoexec.runtimes.megatron.hf_files import HFFiles, save_hf
from isoexec.runtimes.skyrl import checkpoint, weights
from isoexec.runtimes.skyrl.config import uses_gpus
from isoexec.runtimes.skyrl.ratio import with_ratio
from isoexec.runtimes.skyrl.wrapper import ContractWrapper

#: ``transformer_config_kwargs`` that say how, not what, the model computes. Others would make another model, or are not read here.
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers")
_IGNORED = ("recompute_modules", "gradient_accumulation_fusion")


class PolicyWorker(MegatronPolicyWorkerBase):
    """The policy of a run: SkyRL's batching, losses and optimizer calls around a model that isoexec builds, loads and exports."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.contract = active_contract()
        self._updates = 0  # since the batch was scored

    # --- start ------------------------------------------------------------------------------------------------------------------

    def init_worker_process_group(self) -> None:
        if not uses_gpus():
            torch.set_num_threads(1)
            os.environ.pop("LOCAL_RANK", None)  # upstream would select that CUDA device
            self._begin_gloo()
        super().init_worker_process_group()
        if not uses_gpus():  # upstream seeds Megatron's tracker where there is a GPU alone
            tensor_parallel.model_parallel_cuda_manual_seed(self.cfg.seed)

    def _begin_gloo(self) -> None:
        if dist.is_initialized():
            return
        timeout = datetime.timedelta(seconds=SKYRL_WORKER_NCCL_TIMEOUT_IN_S)
        if self._world_size == 1 or os.environ["MASTER_ADDR"].startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo listens, even alone
        if self._world_size > 1:
            dist.init_process_group("gloo", timeout=timeout)
        else:  # a store over TCP would listen, on every interface
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

    def init_configs(self, model_path, megatron_config, model_config_kwargs, transformer_config_kwargs, **unused) -> None:
        """Read the checkpoint's configuration; everything that decides bits comes from it and from the contract."""
        self.hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        self.folder = Path(model_path)
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        recomputation = self._recomputation(get_config_as_dict(transformer_config_kwargs))
        self.provider = models.transformer_config(
            self.hf_config,
            self._groups,
            sequence_parallel=self._groups.tp.size() > 1,
            aux_loss=_aux_loss(megatron_config),
            **recomputation,
        )
        self.bridge, self.is_vlm, self.enable_router_replay = None, False, False
        self.megatron_config = megatron_config
        self.strategy.hf_config = self.hf_config
        self.tokenizer = get_tokenizer(model_path, trust_remote_code=False)

    def _recomputation(self, wanted: dict) -> dict:
        other = sorted(set(wanted) - {*_RECOMPUTATION, *_IGNORED})
        if other:
            raise ContractError(
                f"trainer.policy.megatron_config.transformer_config_kwargs: expected {', '.join(_RECOMPUTATION)}, found "
                f"{', '.join(other)}; the model is built from its checkpoint's configuration"
            )
        return {name: wanted[name] for name in _RECOMPUTATION if self.cfg.gradient_checkpointing and wanted.get(name) is not None}

    def make_megatron_module(self, wrap_with_ddp: bool = True, ddp_config=None, **unused) -> list[torch.nn.Module]:
        """The policy with its checkpoint's weights, under DDP with a distributed optimizer's buffers."""
        float16 = models.build_model(
            self.hf_config, self.provider, self._groups, torch.device(device_type()), padded=not self.cfg.remove_microbatch_padding
        )
        models.load(float16.module, self.hf_config, self.folder, self._groups)
        if not wrap_with_ddp:
            return [float16]
        settings = {"use_distributed_optimizer": True} | ({} if ddp_config is None else get_config_as_dict(ddp_config))
        return [DistributedDataParallel(self.provider, DistributedDataParallelConfig(**settings), float16)]

    def init_model(self, model_path, num_training_steps: int = 1e9) -> None:
        super().init_model(model_path, num_training_steps)
        if self.contract is not None:
            self.model = ContractWrapper(
                config=self.cfg,
                actor_module=self.actor_module,
                actor_optimizer=self.optimizer,
                policy_loss_fn=self.policy_loss_fn,
                contract=self.contract,
                vocab_size=self.hf_config.get_text_config().vocab_size,
                sequence_parallel=self.provider.sequence_parallel,
            )
        self.model.policy_loss_fn = with_ratio(self.policy_loss_fn)

    @property
    def gpt(self) -> torch.nn.Module:
        """The ``GPTModel`` inside the wrappers."""
        model = self.actor_module[0]
        while hasattr(model, "module"):
            model = model.module
        return model

    # --- a step -----------------------------------------------------------------------------------------------------------------

    def forward(self, data, loss_fn=None, loss_fn_config=None):
        self._updates = 0
        return super().forward(data, loss_fn, loss_fn_config)

    def forward_backward(self, data, loss_fn=None, loss_fn_config=None):
        """As upstream; before the first update since scoring, the loss's metrics also come under ``first_minibatch/``."""
        output = super().forward_backward(data, loss_fn, loss_fn_config)
        if self._updates == 0:
            prefix = "loss_metrics/"
            first = {name.removeprefix(prefix): value for name, value in output.metrics.items() if name.startswith(prefix)}
            output.metrics.update({f"first_minibatch/{name}": value for name, value in first.items()})
        return output

    def optim_step(self):
        norm = super().optim_step()
        self._updates += 1
        return norm

    # --- GPU memory that a CPU has not --------------------------------------------------------------------------------------------

    def offload_to_cpu(self, *args, **kwargs) -> None:
        if uses_gpus():
            super().offload_to_cpu(*args, **kwargs)

    def backload_to_gpu(self, *args, **kwargs) -> None:
        if uses_gpus():
            super().backload_to_gpu(*args, **kwargs)

    def _set_numa_affinity(self, rank: int) -> None:
        if find_library("numa"):  # where there is none, upstream asks this program for libnuma's functions
            super()._set_numa_affinity(rank)

    # --- weights ----------------------------------------------------------------------------------------------------------------

    async def init_weight_sync_state(self, client, engine_config) -> None:
        self._sync = weights.make_sync(self)
        await self._sync.begin(client, engine_config)

    async def begin_upstream_sync(self, client, engine_config) -> None:
        """SkyRL's senders and receivers, for GPUs."""
        await super(MegatronPolicyWorkerBase, self).init_weight_sync_state(client, engine_config)

    async def broadcast_to_inference_engines(self, client, engine_config, model_id=None) -> None:
        """Bring the policy's weights into every engine; under a contract both sides prove first that they are one program."""
        await self._sync.run(client, engine_config)

    async def send_upstream(self, client, engine_config) -> None:
        """SkyRL's transfer by IPC or NCCL, for GPUs."""
        await super().broadcast_to_inference_engines(client, engine_config)

    def memory_to_share(self):
        """Context in which the GPU memory that is allocated can be opened by another process."""
        return self._expandable_segments_disabled_for_sync()

    def begin_weight_digests(self) -> PendingDigests:
        """Launch the digests of the weights; every rank calls, and makes the manifest of them by ``manifest_of_ranks``."""
        return models.begin_weight_digests(self.gpt, self.hf_config, self._groups)

    @property
    def whole(self) -> bool:
        """Whether this rank runs every layer, as no pipeline stage does."""
        return self._groups.pp.size() == 1

    def hf_tensors(self, device: torch.device = CPU) -> dict[str, torch.Tensor]:
        """Every parameter under its HF name, whole; every rank calls, every rank gets them. On a GPU, for the time until they change."""
        return models.hf_tensors(self.gpt, self.hf_config, self._groups, device=device)

    # --- disk -------------------------------------------------------------------------------------------------------------------

    def save_checkpoint(self, ckpt_dir: str, tokenizer=None) -> None:
        if self._rank == 0:
            Path(ckpt_dir).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        checkpoint.save(ckpt_dir, self.actor_module[0], self.optimizer, self.scheduler)
        dist.barrier()

    def load_checkpoint(self, ckpt_dir: str, load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True) -> None:
        checkpoint.load(ckpt_dir, self.actor_module[0], self.optimizer, self.scheduler)
        dist.barrier()

    def save_hf_model(self, export_dir: str, tokenizer) -> None:
        """The policy in its checkpoint's own form, with the files beside the weights."""
        tensors = self.hf_tensors()
        if self._rank == 0:
            names = shutil.ignore_patterns("*.safetensors*", "*.bin", "*.pt", "*.pth", "*.py")
            shutil.copytree(self.folder, export_dir, ignore=names, dirs_exist_ok=True)
            save_hf(HFFiles(self.folder).in_stored_form(tensors), export_dir)
        dist.barrier()


def _aux_loss(megatron_config) -> float:
    kind = megatron_config.moe_router_load_balancing_type
    if kind not in ("none", "aux_loss"):
        raise ContractError(f"moe_router_load_balancing_type: expected 'none' or 'aux_loss', found {kind!r}; choose one of them")
    return megatron_config.moe_aux_loss_coeff if kind == "aux_loss" else 0.0
