"""A policy worker's state on disk: parameters, fp32 master weights, Adam's moments and the schedule, as safetensors and JSON.

Bit for bit, and nothing is unpickled: SkyRL's own checkpoints are, by torch.load. A rank writes what it holds, so a run resumes in the
layout that wrote the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from megatron.core import parallel_state

from isoexec.contract import ContractError
from isoexec.runtimes.megatron.checkpoint import policy_tensors
from isoexec.runtimes.skyrl.tensors import read_tensors, write_tensors

_FORMAT = 1


def save(folder: str | Path, model: torch.nn.Module, optimizer, scheduler) -> None:
    """Write ``rank-<n>.safetensors`` and ``.json`` of this rank.

    Args:
        folder: exists; shared by all ranks.
        model: the policy, as DDP wraps it.
        optimizer: Megatron's, distributed.
        scheduler: Megatron ``OptimizerParamScheduler``.
    """
    tensors, options = _optimizer_state(optimizer)
    tensors |= {f"model.{name}": tensor for name, tensor in policy_tensors(model).items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng.cuda"] = torch.cuda.get_rng_state()
    numbers = {"format": _FORMAT, "layout": _layout(), "options": options, "scheduler": scheduler.state_dict()}
    write_tensors(_file(folder, "safetensors"), tensors)
    _file(folder, "json").write_text(json.dumps(numbers))


def load(folder: str | Path, model: torch.nn.Module, optimizer, scheduler) -> None:
    """Read what :func:`save` wrote.

    Raises:
        ContractError: the checkpoint is of another layout or model; names what differs.
    """
    path = _file(folder, "safetensors")
    if not path.is_file():
        raise ContractError(f"checkpoint: no {path}; resume on as many ranks as wrote the checkpoint")
    numbers = json.loads(_file(folder, "json").read_text())
    _expect("format", numbers.get("format"), _FORMAT)
    _expect("layout", numbers.get("layout"), _layout())
    stored = dict(read_tensors(path))
    with torch.no_grad():
        for name, tensor in policy_tensors(model).items():
            _copy(f"model.{name}", stored, tensor)
        _restore_optimizer(optimizer, stored, numbers["options"])
    scheduler.load_state_dict(numbers["scheduler"])
    torch.set_rng_state(stored.pop("rng.cpu"))
    if "rng.cuda" in stored:
        torch.cuda.set_rng_state(stored.pop("rng.cuda"))
    if stored:
        raise ContractError(f"checkpoint: {path} holds what this policy does not: {', '.join(sorted(stored)[:4])}; resume with its model")


def _file(folder, suffix: str) -> Path:
    return Path(folder) / f"rank-{torch.distributed.get_rank()}.{suffix}"


def _layout() -> dict[str, int]:
    """Degrees of every kind of parallelism; a shard fits one set of them."""
    return {
        "world": torch.distributed.get_world_size(),
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "cp": parallel_state.get_context_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
    }


def _groups(optimizer):
    """(name, torch optimizer, index of the group, group) of Megatron's optimizer, chained or not."""
    for n, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for g, group in enumerate(part.optimizer.param_groups):
            yield f"optimizer.{n}.{g}", part.optimizer, group


def _optimizer_state(optimizer) -> tuple[dict[str, torch.Tensor], dict[str, dict]]:
    """Master weights and moments by name; and the numbers of each group."""
    tensors, options = {}, {}
    for name, adam, group in _groups(optimizer):
        for i, parameter in enumerate(group["params"]):
            tensors[f"{name}.{i}"] = parameter
            for key, value in adam.state.get(parameter, {}).items():
                tensors[f"{name}.{i}.{key}"] = torch.as_tensor(value)
        options[name] = {key: value for key, value in group.items() if isinstance(value, (bool, int, float))}
    return tensors, options


def _restore_optimizer(optimizer, stored: dict[str, torch.Tensor], options: dict[str, dict]) -> None:
    for name, adam, group in _groups(optimizer):
        if name not in options:
            raise ContractError(f"checkpoint: {name} is missing; resume with the optimizer that wrote it")
        group.update(options[name])
        for i, parameter in enumerate(group["params"]):
            _copy(f"{name}.{i}", stored, parameter)
            prefix = f"{name}.{i}."
            state = {key[len(prefix) :]: stored.pop(key) for key in sorted(stored) if key.startswith(prefix)}
            if state:
                # A step count stays where torch keeps it, on the CPU.
                adam.state[parameter] = {key: v if v.dim() == 0 else v.to(parameter.device) for key, v in state.items()}


def _copy(name: str, stored: dict[str, torch.Tensor], target: torch.Tensor) -> None:
    value = stored.pop(name, None)
    if value is None or value.shape != target.shape or value.dtype != target.dtype:
        found = "nothing" if value is None else f"{value.dtype} {tuple(value.shape)}"
        raise ContractError(
            f"checkpoint: {name}: expected {target.dtype} {tuple(target.shape)}, found {found}; resume with the model that wrote it"
        )
    target.copy_(value)


def _expect(what: str, found, wanted) -> None:
    if found != wanted:
        raise ContractError(f"checkpoint: {what}: expected {wanted}, found {found}; resume in the layout that wrote the checkpoint")
