"""SkyRL's configuration with a section ``isoexec``, fitted to the machine and checked before anything starts."""

import copy
import dataclasses
import functools
import math
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from skyrl.train.config import AlgorithmConfig, SkyRLTrainConfig, TrainerConfig
from skyrl.train.config.config import BaseConfig
from skyrl.train.utils import validate_cfg
from skyrl.train.utils.tracking import Tracking

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.runtimes.skyrl.schema import ConfigError, check_types

#: In the order in which a comparison runs them: what a contract refuses is found in the first minute.
ARMS = ("isoexec", "native")
ON_MISMATCH = ("stop", "warn")
#: Tells the policy worker where weights pass to the engines.
SYNC_VARIABLE = "ISOEXEC_SYNC_FOLDER"
#: Tells an actor of a run on the CPU to see no GPU. Ray itself must see as many as it counts.
HIDE_VARIABLE = "ISOEXEC_HIDE_GPUS"


@dataclass
class IsoExecConfig(BaseConfig):
    """The section ``isoexec``."""

    arm: str = "isoexec"
    """``"isoexec"``: both sides under one contract; ``"native"``: the same run with none."""
    contract: str | None = None
    """Contract file, on a path that every node reads. ``None``: built from the checkpoint, into ``out``."""
    on_mismatch: str = "stop"
    """What a token whose two logprobs differ does: ``"stop"`` or ``"warn"``. The native arm always warns."""
    seed: int | None = None
    """Of data order and sampling; ``None``: ``trainer.seed``."""
    out: str = "out/train"
    """Folder of ``steps.jsonl``, checkpoints and logs."""
    environments: dict[str, str] = field(default_factory=dict)
    """Environment name -> ``"module:Class"``, registered with skyrl-gym."""
    ray_address: str | None = None
    """Address of a Ray cluster to join; ``None`` starts one on this machine, on the loopback interface."""
    sync_folder: str = "/dev/shm"
    """Where weights pass from the policy to the engines on the CPU; engines on other nodes need a shared folder."""


@dataclass
class DAPOAlgorithmConfig(AlgorithmConfig):
    """SkyRL's algorithm settings and DAPO's soft overlong punishment."""

    overlong_buffer_len: int = 0
    """Tokens before the longest response within which the punishment grows from 0 to its full value; 0 switches it off."""
    overlong_buffer_penalty_factor: float = 1.0


@dataclass
class DAPOTrainerConfig(TrainerConfig):
    algorithm: DAPOAlgorithmConfig = field(default_factory=DAPOAlgorithmConfig)


@dataclass
class TrainConfig(SkyRLTrainConfig):
    trainer: DAPOTrainerConfig = field(default_factory=DAPOTrainerConfig)
    isoexec: IsoExecConfig = field(default_factory=IsoExecConfig)


def resolve(config: TrainConfig | DictConfig | dict) -> TrainConfig:
    """The typed configuration of a run, fitted to the machine (:func:`_fit`) and checked.

    Args:
        config: :class:`TrainConfig`, or its content as nested mappings; what is left out has SkyRL's default.

    Raises:
        ConfigError: an entry is unknown, mistyped or asks for what the run cannot do.
    """
    try:
        typed = _typed(config)
        _fit(typed)
        _check(typed)
        validate_cfg(typed)
        _check_schedule(typed.trainer)
    except ConfigError:
        raise
    except (AssertionError, AttributeError, NotImplementedError, TypeError, ValueError) as error:  # SkyRL checks some types by using them
        raise ConfigError(f"configuration: {_said(error)}") from error
    return typed


def _typed(config) -> TrainConfig:
    if isinstance(config, TrainConfig):
        check_types(dataclasses.asdict(config), TrainConfig, whole=True)
        return copy.deepcopy(config)
    given = OmegaConf.create(config)
    check_types(OmegaConf.to_container(given, resolve=True), TrainConfig)
    return TrainConfig.from_dict_config(given)


def _said(error: Exception) -> str:
    """An error's text; where it has none, as some assertions of SkyRL's, the line that raised it."""
    if text := str(error):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"refused by {Path(frame.filename).name}, line {frame.lineno}: {frame.line}"


def uses_gpus() -> bool:
    """Whether this run computes on GPUs."""
    return torch.cuda.is_available()


def _fit(config: TrainConfig) -> None:
    """Settle what has one sensible value here."""
    own, trainer, engine = config.isoexec, config.trainer, config.generator.inference_engine
    own.out = str(Path(own.out).expanduser().resolve())
    if own.seed is None:
        own.seed = trainer.seed
    if trainer.seed not in (own.seed, _DEFAULTS.seed):
        raise ConfigError(f"trainer.seed: expected isoexec.seed, {own.seed}, found {trainer.seed}; a run has one seed, isoexec.seed")
    trainer.seed = own.seed
    folders = {"ckpt_path": "checkpoints", "export_path": "exports", "log_path": "logs"}
    for name, folder in folders.items():  # SkyRL's defaults lie in the user's home and in /tmp
        found = getattr(trainer, name)
        chosen = Path(own.out) / folder if found == getattr(_DEFAULTS, name) else Path(found)
        setattr(trainer, name, str(chosen.expanduser().resolve()))  # an actor may have another working folder
    if trainer.policy.model.path:
        trainer.policy.model.path = trainer.ref.model.path = str(Path(trainer.policy.model.path).expanduser().resolve())
    # Prompts are drawn without an end; SkyRL counts epochs to know when to stop, and maps a step to one when it resumes.
    trainer.epochs = max(trainer.epochs, (trainer.max_training_steps or 0) + 1)
    config.data.dataloader.num_workers = 0  # prompts are in memory; each worker would import torch anew
    trainer.flash_attn = False  # isoexec builds the model; here it would only set variables that Megatron refuses
    if own.ray_address is None:  # a cluster of the run's own has no metrics agent
        trainer.enable_ray_gpu_monitor = engine.enable_ray_prometheus_stats = False
    if engine.tensor_parallel_size == engine.pipeline_parallel_size == 1:
        engine.distributed_executor_backend = "mp"  # its one worker lives in the engine's process
    if own.arm == "native":  # upstream's attention without Transformer Engine takes no packed sequences
        trainer.remove_microbatch_padding = False
    if uses_gpus():
        return
    trainer.use_expandable_segments = engine.use_expandable_segments = False
    trainer.enable_ray_gpu_monitor = engine.enable_ray_prometheus_stats = False
    engine.distributed_executor_backend = "mp"
    trainer.policy.megatron_config.ddp_config.average_in_collective = False  # gloo has no averaging reduction


_DEFAULTS = TrainerConfig()


#: Counts of which a run needs at least one. What is None is not looked at.
_COUNTS = (
    *(f"trainer.{name}" for name in (
        "train_batch_size", "policy_mini_batch_size", "eval_batch_size", "micro_train_batch_size_per_gpu",
        "micro_forward_batch_size_per_gpu", "max_prompt_length", "max_training_steps", "update_epochs_per_batch",
        "placement.policy_num_nodes", "placement.policy_num_gpus_per_node",
    )),
    *(f"trainer.policy.megatron_config.{name}_parallel_size" for name in (
        "tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor",
    )),
    *(f"generator.{name}" for name in (
        "n_samples_per_prompt", "eval_n_samples_per_prompt", "sampling_params.max_generate_length",
        "eval_sampling_params.max_generate_length",
    )),
    *(f"generator.inference_engine.{name}" for name in (
        "num_engines", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "data_parallel_size", "max_num_seqs",
        "max_num_batched_tokens",
    )),
)  # fmt: skip
_SEEDS = 1 << 32  # numpy's generator takes no more


def check_numbers(config: Mapping) -> None:
    """Refuse a number with which no run can start, whatever the model.

    Args:
        config: nested, plain; what it lacks is not looked at.

    Raises:
        ConfigError: a float that is not finite, a seed that no generator takes, a count below 1.
    """
    for path, value in _floats(config, ""):
        if not math.isfinite(value):
            raise ConfigError(f"{path}: expected a finite number, found {value}")
    for path in ("isoexec.seed", "trainer.seed"):
        seed = _entry(config, path)
        if isinstance(seed, int) and not 0 <= seed < _SEEDS:
            raise ConfigError(f"{path}: expected 0 to {_SEEDS - 1}, found {seed}")
    for path in _COUNTS:
        count = _entry(config, path)
        if isinstance(count, int) and count < 1:
            raise ConfigError(f"{path}: expected at least 1, found {count}")


def _floats(value, path: str) -> Iterator[tuple[str, float]]:
    """Every float below ``path``, and where it is."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _floats(item, f"{path}.{key}" if path else str(key))


def _entry(config: Mapping, path: str):
    return functools.reduce(lambda part, name: part.get(name) if isinstance(part, Mapping) else None, path.split("."), config)


def _check(config: TrainConfig) -> None:
    check_numbers(dataclasses.asdict(config))
    own, trainer, generator = config.isoexec, config.trainer, config.generator
    _one_of("isoexec.arm", own.arm, ARMS)
    _one_of("isoexec.on_mismatch", own.on_mismatch, ON_MISMATCH)
    _one_of("trainer.strategy", trainer.strategy, ("megatron",))
    _one_of("trainer.fully_async.enabled", trainer.fully_async.enabled, (False,))
    _one_of("generator.batched", generator.batched, (False,), "each sample has a seed of its own")
    _one_of("generator.chat_template.name_or_path", generator.chat_template.name_or_path, (None,), "it tokenises responses anew")
    _one_of("trainer.policy.model.lora.rank", trainer.policy.model.lora.rank, (0,))
    _one_of("trainer.mtp.enabled", trainer.mtp.enabled, (False,))
    _one_of("trainer.policy.megatron_config.freeze_moe_router", trainer.policy.megatron_config.freeze_moe_router, (False,))
    _one_of("trainer.resume_mode", trainer.resume_mode, (None, "none", "latest", "from_path"))
    for name in ("use_kl_loss", "use_kl_in_reward"):
        _one_of(f"trainer.algorithm.{name}", getattr(trainer.algorithm, name), (False,), "a run has no reference model")
    _check_algorithm(trainer.algorithm, generator)
    _one_of("trainer.logger", trainer.logger, tuple(Tracking.supported_backends))
    if not os.access(own.sync_folder, os.W_OK | os.X_OK) or not Path(own.sync_folder).is_dir():
        raise ConfigError(f"isoexec.sync_folder: expected a folder that can be written to, found {own.sync_folder!r}")
    if trainer.max_training_steps is None:
        raise ConfigError("trainer.max_training_steps: expected a number of steps, found None; prompts are drawn without an end")
    if not trainer.policy.model.path or not Path(trainer.policy.model.path).is_dir():
        raise ConfigError(
            f"trainer.policy.model.path: expected a folder with a checkpoint in HF format, found {trainer.policy.model.path!r}"
        )
    missing = [file for file in config.data.train_data if not Path(file).is_file()]
    if missing or not config.data.train_data:
        raise ConfigError(f"data.train_data: expected existing files, found {missing or 'none'}")
    if own.contract is not None and not Path(own.contract).is_file():
        raise ConfigError(f"isoexec.contract: no file {own.contract!r}; `isoexec contract build` writes one, None builds it from the model")
    if own.arm == "isoexec":
        _check_contract_arm(config)


def _check_algorithm(algorithm: DAPOAlgorithmConfig, generator) -> None:
    """What would show in the first step, or never."""
    _one_of("trainer.algorithm.dynamic_sampling.type", algorithm.dynamic_sampling.type, (None, "filter", "replace"))
    for name in ("eps_clip_low", "eps_clip_high", "overlong_buffer_penalty_factor"):
        _at_least_0(f"trainer.algorithm.{name}", getattr(algorithm, name))
    longest = generator.sampling_params.max_generate_length
    if not 0 <= algorithm.overlong_buffer_len <= longest:
        raise ConfigError(
            f"trainer.algorithm.overlong_buffer_len: expected 0 to generator.sampling_params.max_generate_length, {longest}, found "
            f"{algorithm.overlong_buffer_len}"
        )
    _at_least_0("generator.eval_sampling_params.temperature", generator.eval_sampling_params.temperature)


def _at_least_0(name: str, found: float) -> None:
    if found < 0:
        raise ConfigError(f"{name}: expected at least 0, found {found}")


def _check_schedule(trainer: TrainerConfig) -> None:
    """What Megatron asserts of an optimizer and its schedule, without a word and in a policy worker."""
    optimizer, where = trainer.policy.optimizer_config, "trainer.policy.optimizer_config."
    _one_of(f"{where}scheduler", optimizer.scheduler, ("constant_with_warmup",))
    for name in ("lr", "weight_decay"):
        _at_least_0(f"{where}{name}", getattr(optimizer, name))
    if len(optimizer.adam_betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.adam_betas):
        raise ConfigError(f"{where}adam_betas: expected two numbers from 0 to below 1, found {optimizer.adam_betas}")
    updates = trainer.max_training_steps * trainer.update_epochs_per_batch * (trainer.train_batch_size // trainer.policy_mini_batch_size)
    if not 0 <= optimizer.num_warmup_steps < updates:
        raise ConfigError(
            f"{where}num_warmup_steps: expected 0 to {updates - 1}, since the run's {trainer.max_training_steps} steps make {updates} "
            f"updates, found {optimizer.num_warmup_steps}; lower it, or raise trainer.max_training_steps"
        )


#: What a contract asks of the sampler, see ``isoexec.runtimes.vllm.settings.REQUEST``.
_SAMPLING = {"top_p": (1.0,), "top_k": (-1, 0), "min_p": (0.0,), "repetition_penalty": (1.0,), "stop": (None,)}


def _check_contract_arm(config: TrainConfig) -> None:
    trainer, generator = config.trainer, config.generator
    for name, allowed in _SAMPLING.items():
        _one_of(
            f"generator.sampling_params.{name}", getattr(generator.sampling_params, name), allowed,
            "the logprob must be of the distribution that was sampled",
        )  # fmt: skip
    if not generator.sampling_params.temperature > 0:
        raise ConfigError(
            f"generator.sampling_params.temperature: expected more than 0, found {generator.sampling_params.temperature}: "
            "a greedy token is not drawn from a distribution"
        )
    if trainer.algorithm.temperature != generator.sampling_params.temperature:
        raise ConfigError(
            f"trainer.algorithm.temperature: expected that of generator.sampling_params, {generator.sampling_params.temperature}, found "
            f"{trainer.algorithm.temperature}; leave it out"
        )
    _one_of("generator.sampling_params.logprobs", generator.sampling_params.logprobs, (0, 1), "the engine's logprobs are compared")
    if not uses_gpus():
        _one_of("generator.inference_engine.enforce_eager", generator.inference_engine.enforce_eager, (True,), "only a GPU has graphs")
    pipeline = generator.inference_engine.pipeline_parallel_size
    _one_of("generator.inference_engine.pipeline_parallel_size", pipeline, (1,), "an engine's layers are not proven over several ranks")
    _one_of("generator.use_conversation_multi_turn", generator.use_conversation_multi_turn, (True,), "an appended token was not sampled")
    _one_of("trainer.remove_microbatch_padding", trainer.remove_microbatch_padding, (True,), "under a contract sequences are packed")
    _one_of("trainer.fused_lm_head_logprob", trainer.fused_lm_head_logprob, (False,), "it computes logprobs outside the op library")
    _one_of("trainer.bf16", trainer.bf16, (True,), "parameters and activations are bf16 in the engine")
    _one_of("generator.inference_engine.model_dtype", generator.inference_engine.model_dtype, ("bfloat16",))


def _one_of(name: str, found, allowed: tuple, because: str = "") -> None:
    if not any(type(found) is type(value) and found == value for value in allowed):
        expected = " or ".join(map(repr, allowed))
        raise ConfigError(f"{name}: expected {expected}, found {found!r}" + (f": {because}" if because else ""))


def check_environment(config: TrainConfig, environ) -> None:
    """Refuse an environment that would decide what the configuration decides.

    Raises:
        ConfigError: the contract variable is set; the run sets it in its own processes.
    """
    if environ.get(CONTRACT_VARIABLE):
        raise ConfigError(f"{CONTRACT_VARIABLE}: expected unset, found {environ[CONTRACT_VARIABLE]!r}; name the file in isoexec.contract")
