"""What a checkpoint must share with the run that continues it, judged from its ``trainer.json`` before anything is written or started."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from isoexec.contract import model_digest, read_config
from isoexec.runtimes.skyrl.config import ConfigError, TrainConfig

#: Entries, with all below them, that move no bit of a run under a contract (without one none is promised). Every other one does, those that
#: SkyRL may add among them.
_MOVE_NONE = (
    # Where files and processes are. Training data, model, tokenizer, contract and the policy's ranks are part of the identity themselves.
    "data",
    "isoexec.contract",
    "isoexec.out",
    "isoexec.ray_address",
    "isoexec.sync_folder",
    "trainer.policy.model.path",
    "trainer.ref",  # no run has a reference model
    "trainer.placement",
    *(f"trainer.{name}_path" for name in ("ckpt", "export", "log", "resume")),
    # How long, and what is kept, evaluated and told on the way.
    *(f"trainer.{name}" for name in (
        "max_training_steps", "epochs", "resume_mode", "ckpt_interval", "max_ckpts_to_keep", "hf_save_interval", "eval_batch_size",
        "eval_before_train", "eval_interval", "dump_eval_results", "dump_data_batch", "project_name", "run_name", "logger", "tags",
        "print_example_interval", "log_example_interval", "num_logger_eval_samples", "num_logger_train_samples", "enable_ray_gpu_monitor",
        "algorithm.dynamic_sampling.max_sample_batches", "policy.record_memory", "policy.torch_profiler_config",
        "policy.megatron_config.hf_export_config", "policy.megatron_config.dist_ckpt_optim_fully_reshardable",
        "policy.megatron_config.moe_per_layer_logging",
    )),
    "generator.eval_sampling_params",
    "generator.eval_n_samples_per_prompt",
    "isoexec.on_mismatch",
    "environment.skyrl_gym.max_env_workers",
    "environment.skyrl_gym.search.log_requests",
    # Memory, and which tokens are scored together.
    *(f"trainer.{name}" for name in (
        "use_expandable_segments", "gradient_checkpointing", "gradient_checkpointing_use_reentrant", "micro_forward_batch_size_per_gpu",
        "policy.optimizer_config.offload_after_step", "policy.megatron_config.empty_cuda_cache",
    )),
    # How engines are laid out and batch.
    *(f"generator.inference_engine.{name}" for name in (
        "num_engines", "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "data_parallel_size", "max_num_seqs",
        "max_num_batched_tokens", "gpu_memory_utilization", "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill",
        "use_expandable_segments", "distributed_executor_backend", "vllm_v1_disable_multiproc", "enable_ray_prometheus_stats",
        "served_model_name", "weight_sync_backend", "weight_transfer_threshold_cuda_ipc_GB", "router_init_kwargs",
        "engine_init_kwargs",
    )),
)  # fmt: skip
#: Beside the configuration, what turns a prompt into tokens and back.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SHOWN = 12  # differences in one message


class Checkpoint(NamedTuple):
    """A checkpoint that a run continues: its folder, and the content of its ``trainer.json``."""

    folder: Path
    state: dict


class Finished(ConfigError):
    """The checkpoint is of the run's last step, or of a later one.

    Attributes:
        line: of ``steps.jsonl`` for the checkpoint's step, without times; None where the checkpoint has none.
    """

    def __init__(self, message: str, line: dict | None):
        super().__init__(message)
        self.line = line


def identity(config: TrainConfig, contract: str | None) -> dict[str, object]:
    """What decides the bits of a run, by name; plain data as JSON gives it back.

    The model's weights are not in it: those of a checkpoint take their place. Of data, configuration and tokenizer it holds hashes, so that
    files may lie elsewhere.

    Args:
        config: resolved; its training data exists.
        contract: digest of the contract, or None.
    """
    found = _moving(dataclasses.asdict(config))
    placement = config.trainer.placement
    found["policy ranks"] = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    found["contract"] = contract
    model = Path(config.trainer.policy.model.path)
    found["model (its config.json)"] = model_digest(read_config(model))
    found["model (its tokenizer)"] = _digest([model / name for name in _TOKENIZER if (model / name).is_file()])
    found["training data"] = _digest(map(Path, config.data.train_data))
    return json.loads(json.dumps(found, default=str))


def judge(trainer, wanted: Mapping[str, object]) -> Checkpoint | None:
    """The checkpoint that ``trainer.resume_mode`` names, if a run with ``wanted`` can continue it; None where there is none.

    Args:
        trainer: section of a resolved configuration.
        wanted: :func:`identity` of the run.

    Raises:
        Finished: it has nothing left to do.
        ConfigError: the checkpoint is missing, damaged, or of another run; names every difference.
    """
    folder = _folder(trainer)
    if folder is None:
        return None
    state = _state(folder)
    names = sorted({*wanted, *state["recipe"]}, key=str)
    missing = "nothing"
    pairs = [(name, state["recipe"].get(name, missing), wanted.get(name, missing)) for name in names]
    different = [f"{name}: expected {_short(old)}, found {_short(new)}" for name, old, new in pairs if old != new]
    if different:
        more = [f"and {len(different) - _SHOWN} more"] if len(different) > _SHOWN else []
        raise ConfigError(
            f"checkpoint {str(folder)!r} is of another run: {'; '.join([*different[:_SHOWN], *more])}; "
            "resume with what is expected, or start a new run in another isoexec.out"
        )
    if state["step"] >= trainer.max_training_steps:
        raise Finished(
            f"trainer.max_training_steps: expected more than the checkpoint's {state['step']}, found {trainer.max_training_steps}; raise it, "
            "there is nothing left to do",
            state.get("line"),
        )
    return Checkpoint(folder, state)


def last_checkpoint(root: Path) -> Path | None:
    """Folder of the last complete checkpoint below ``root``.

    Raises:
        ConfigError: the file that names it holds no step.
    """
    latest = root / "latest_ckpt_global_step.txt"
    if not latest.exists():
        return None
    text = latest.read_text().strip()
    if not text.isdecimal():
        raise ConfigError(f"{latest}: expected the step of the last checkpoint, found {text[:80]!r}; write it there")
    return root / f"global_step_{int(text)}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint folder's name."""
    prefix, _, step = folder.name.rpartition("_")
    return int(step) if prefix == "global_step" and step.isdecimal() else None


def _folder(trainer) -> Path | None:
    mode = trainer.resume_mode
    if mode in (None, "none"):
        return None
    if mode == "latest":
        return last_checkpoint(Path(trainer.ckpt_path))
    if mode != "from_path":
        raise ConfigError(f"trainer.resume_mode: expected none, latest or from_path, found {mode!r}")
    folder = Path(trainer.resume_path or "").expanduser()
    if step_of(folder) is None or not folder.is_dir():
        raise ConfigError(f"trainer.resume_path: expected a global_step_ folder, found {trainer.resume_path!r}")
    return folder.resolve()


def _state(folder: Path) -> dict:
    advice = "name a global_step_ folder of this program"
    try:
        state = json.loads((folder / "trainer.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {str(folder)!r}: {error}; {advice}") from error
    good = isinstance(state, dict) and isinstance(state.get("step"), int) and isinstance(state.get("stream"), dict)
    if not good:
        raise ConfigError(f"checkpoint {str(folder)!r}: trainer.json: expected step and stream, found {_short(state)}; {advice}")
    if not isinstance(state.get("recipe"), dict):
        raise ConfigError(
            f"checkpoint {str(folder)!r}: trainer.json does not say of what run it is (`recipe`), as those of earlier versions do not; "
            "start a new run"
        )
    return state


def _moving(plain: Mapping) -> dict[str, object]:
    """The entries of a configuration that may move a bit, by their paths."""
    every = (leaf for section, value in plain.items() for leaf in _leaves(section, value))
    return {name: value for name, value in every if not _below(name, _MOVE_NONE)}


def _leaves(path: str, value) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    else:
        yield path, value


def _below(name: str, paths: tuple[str, ...]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def _digest(files) -> str:
    """sha256 over the sha256 of each file, in order."""
    whole = hashlib.sha256()
    for file in files:
        with open(file, "rb") as content:
            whole.update(hashlib.file_digest(content, "sha256").digest())
    return f"sha256 {whole.hexdigest()}"


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
