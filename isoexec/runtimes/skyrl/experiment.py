"""SkyRL's experiment: datasets, engines, policy and trainer, put together without a framework in the driver."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray
from loguru import logger
from skyrl.backends.skyrl_train.inference_servers.common import SERVER_PORT_STRIDE
from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup
from skyrl.train.dataset import PromptDataset
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.utils.tok import get_tokenizer

from isoexec.runtimes.skyrl import cluster, environments, registries
from isoexec.runtimes.skyrl.actors import EngineActor, PolicyActor, engine_request
from isoexec.runtimes.skyrl.client import InferenceClient
from isoexec.runtimes.skyrl.config import ConfigError, TrainConfig, uses_gpus
from isoexec.runtimes.skyrl.generator import SeededGenerator
from isoexec.runtimes.skyrl.trainer import Trainer, policy_actors

_PRINTS_TRACEBACKS = ("skyrl.train.entrypoints.main_base", "skyrl.train.utils.tracking")
_FIRST_PORT = 8000
_ANSWER = 60  # seconds in which a process of the run answers that it lives, and Ray notices that a node does not
_GOODBYE = 20  # seconds for engines to end by themselves


class Experiment(BasePPOExp):
    """One run. Construct it before Ray starts, so that a fault of the data is found first.

    Args:
        config: resolved.
        recipe: :func:`isoexec.runtimes.skyrl.resume.identity` of the run.

    Raises:
        ConfigError: the data or an environment cannot be used.
    """

    def __init__(self, config: TrainConfig, recipe: dict):
        # Upstream's constructor trusts a checkpoint's code, filters prompts in eight processes and wants Ray.
        self.cfg, self._recipe = config, recipe
        self.tokenizer = get_tokenizer(
            config.trainer.policy.model.path,
            trust_remote_code=False,
            use_fast=not config.trainer.disable_fast_tokenizer,
            padding_side="left",
        )
        environments.register(config.isoexec.environments, config.environment.env_class)
        self.train_dataset = self.get_train_dataset()
        self.eval_dataset = self.get_eval_dataset()
        self.colocate_pg = None
        self.trainer: Trainer | None = None
        self._groups: list[ServerGroup] = []
        self._router = None
        self._registries: list = []

    def get_train_dataset(self) -> PromptDataset:
        return self._dataset("data.train_data", self.cfg.data.train_data)

    def get_eval_dataset(self) -> PromptDataset | None:
        if self.cfg.trainer.eval_interval <= 0 or not self.cfg.data.val_data:
            return None
        return self._dataset("data.val_data", self.cfg.data.val_data)

    def _dataset(self, name: str, files: list[str]) -> PromptDataset:
        for file in files:
            if not Path(file).is_file():
                raise ConfigError(f"{name}: no file {file!r}; expected parquet or JSON lines")
        longest = self.cfg.trainer.max_prompt_length
        try:
            found = PromptDataset(datasets=files, tokenizer=self.tokenizer, max_prompt_length=longest, num_workers=0)
        except KeyError as error:
            raise ConfigError(f"{name}: {files}: no column {error}; a prompt is a list of messages in 'prompt'") from error
        if not len(found):
            raise ConfigError(f"{name}: no prompt of at most trainer.max_prompt_length = {longest} tokens in {files}; raise it")
        return found

    def run(self) -> None:
        """As upstream, which prints the traceback of whatever ends a run: here it goes to the log, and the caller says what happened."""
        for module in _PRINTS_TRACEBACKS:
            logger.disable(module)
        try:
            super().run()
        except Exception:
            logger.opt(exception=True).info("the run ends")
            raise
        finally:
            for module in _PRINTS_TRACEBACKS:
                logger.enable(module)

    # --- parts ------------------------------------------------------------------------------------------------------------------

    def get_generator(self, cfg, tokenizer, inference_engine_client) -> SeededGenerator:
        return SeededGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=inference_engine_client.model_name,
            run_seed=cfg.isoexec.seed,
        )

    def get_trainer(self, cfg, **parts) -> Trainer:
        return Trainer(cfg, recipe=self._recipe, **parts)

    def _setup_trainer(self) -> Trainer:
        for folder in (self.cfg.trainer.export_path, self.cfg.trainer.ckpt_path):
            Path(folder).mkdir(parents=True, exist_ok=True)
        if self.cfg.trainer.placement.colocate_all:
            self.colocate_pg = cluster.placement(cluster.engine_processes(self.cfg))
        starting = self._start_engines()
        self._registries = registries.start()
        client = InferenceClient(
            proxy_url="",
            server_urls=[],
            data_parallel_size=self.cfg.generator.inference_engine.data_parallel_size,
            model_name=self.cfg.trainer.policy.model.path,
            tokenizer=self.tokenizer,
        )
        self.trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=self.get_tracker(),
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=self.get_generator(self.cfg, self.tokenizer, client),
            colocate_pg=self.colocate_pg,
        )
        self.trainer.trajectory_logger = self.get_trajectory_logger()
        if uses_gpus() and self.cfg.trainer.placement.colocate_all:  # the policy needs the memory that the engines free when they sleep
            self._connect(client, starting)
            asyncio.run(_put_to_sleep(client))
            self.trainer.build_models(PolicyActor, None, None)
        else:  # both spend most of their start importing
            self.trainer.build_models(PolicyActor, None, None)
            self._connect(client, starting)
        return self.trainer

    def _start_engines(self) -> list:
        """Start every engine; returns what to wait for."""
        engine = self.cfg.generator.inference_engine
        placement = self.colocate_pg or cluster.placement(cluster.engine_processes(self.cfg))
        per_engine = cluster.engine_processes(self.cfg) // engine.num_engines
        for i in range(engine.num_engines):
            self._groups.append(
                ServerGroup(
                    cli_args=engine_request(self.cfg),
                    num_servers=engine.data_parallel_size,
                    placement_group=placement,
                    placement_group_bundle_offset=i * per_engine,
                    start_port=_FIRST_PORT + i * engine.data_parallel_size * SERVER_PORT_STRIDE,
                    enable_dp=engine.data_parallel_size > 1,
                    server_actor_cls=EngineActor,
                    use_expandable_segments=engine.use_expandable_segments,
                    distributed_executor_backend=engine.distributed_executor_backend,
                    enable_ray_prometheus_stats=engine.enable_ray_prometheus_stats,
                )
            )
        return [reference for group in self._groups for reference in group.start(blocking=False)]

    def _connect(self, client: InferenceClient, starting: list) -> None:
        """Wait for the engines and tell the client where they are."""
        ray.get(starting)
        urls = [info.url for group in self._groups for info in group.server_infos]
        if len(urls) == 1:
            client.connect(urls[0], urls, routed=False)
            return
        from skyrl.backends.skyrl_train.inference_servers.utils import build_router_args
        from skyrl.backends.skyrl_train.inference_servers.vllm_router import VLLMRouter

        args = build_router_args(self.cfg.generator.inference_engine, server_urls=urls)
        args.host = ray.util.get_node_ip_address()
        self._router = VLLMRouter(args, log_path=self.cfg.trainer.log_path)
        client.connect(self._router.start(), urls, routed=True)

    def lost(self) -> Exception | None:
        """What Ray says of a policy worker or an engine that is gone; None where all of them answer, or need longer for it."""
        actors = [] if self.trainer is None else policy_actors(self.trainer)
        actors += [engine for group in self._groups for engine in group.get_actors()]
        try:
            ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=_ANSWER)
        except ray.exceptions.GetTimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return error
        return None

    def close(self) -> None:
        """End every process of the run."""
        for actor in [] if self.trainer is None else policy_actors(self.trainer):
            ray.kill(actor)  # so that nothing runs on after the driver
        if self._router is not None:
            self._router.shutdown()
        self._end([engine for group in self._groups for engine in group.get_actors()])

    @staticmethod
    def _end(engines: list) -> None:
        """One that still starts answers when it is up: a minute or more, for which an interrupted run does not wait."""
        try:
            leaving = [engine.shutdown.remote() for engine in engines]
            if leaving:
                ray.wait(leaving, num_returns=len(leaving), timeout=_GOODBYE)
            for engine in engines:
                ray.kill(engine)
        except Exception as error:  # with its node gone there is nobody to ask
            logger.warning(f"closing the engines: {error}")


async def _put_to_sleep(client: InferenceClient) -> None:
    """The engines give their memory up; the client's connections end with the loop that they were made in."""
    await client.sleep()
    await client.teardown()
