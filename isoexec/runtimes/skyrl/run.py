"""A DAPO run from its configuration to its last step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from isoexec.contract import ContractError, ExecutionContract
from isoexec.runtimes.compose import composed
from isoexec.runtimes.skyrl import resume
from isoexec.runtimes.skyrl.address import answering
from isoexec.runtimes.skyrl.aside import set_aside
from isoexec.runtimes.skyrl.config import ConfigError, TrainConfig, check_environment, resolve
from isoexec.runtimes.skyrl.layout import run_contract


class RunStopped(RuntimeError):
    """A process of the run was lost, or a disk refused a checkpoint. What was saved before is whole, and the run can be resumed."""


def train(config: TrainConfig | DictConfig | dict, begin: Callable[[], None] = lambda: None) -> Path:
    """Train, and write one JSON line per step.

    Args:
        config: SkyRL's configuration with a section ``isoexec`` (:class:`~isoexec.runtimes.skyrl.config.IsoExecConfig`).
        begin: called when nothing can be refused any more, before the first result is written. The data has been read.

    Returns:
        The folder with ``steps.jsonl``, ``contract.json`` (isoexec arm), checkpoints and logs. Those of an older run are set aside
        (:func:`~isoexec.runtimes.skyrl.aside.set_aside`) once this one has its processes' places, and not before.

    Raises:
        ConfigError: a setting, the data, the checkpoint or the Ray cluster cannot be used; nothing is trained on, nothing set aside.
        ContractError: the two sides need not compute the same bits: by the configuration, or, in whatever step, by what they say of
            themselves or hold after a sync; or an environment gave what cannot be trained on.
        RolloutMismatch: a token's two logprobs differ.
        NotFinite: a token's logprob is NaN or infinite.
        RewardError: an environment raised, or a reward is not finite.
        NothingToLearn: dynamic sampling found no group to train on.
        RunStopped: a process of the run was lost, or its checkpoint could not be written.
    """
    config = resolve(config)
    check_environment(config, os.environ)
    if config.isoexec.ray_address is not None:
        answering(config.isoexec.ray_address)
    contract = contract_of(config)
    recipe = resume.identity(config, None if contract is None else contract.digest)
    resumed = resume.judge(config.trainer, recipe)
    from isoexec.runtimes.skyrl import cluster  # a fault of the configuration is found before these imports are paid for
    from isoexec.runtimes.skyrl.experiment import Experiment

    out = Path(config.isoexec.out)
    out.mkdir(parents=True, exist_ok=True)
    file = None if contract is None else out / "contract.json"
    experiment = Experiment(config, recipe)
    environment = cluster.actor_environment(config, file)
    stop = cluster.start(config, environment)
    try:
        set_aside(config, resumed)
        begin()
        if contract is not None:
            file.write_text(contract.to_json(), encoding="utf-8")
        experiment.run()
    except Exception as error:
        # Of an actor: the fault itself, without the frames that it travelled through.
        fault = getattr(error, "cause", None) or error
        if isinstance(fault, ContractError | ConfigError):
            raise fault from None
        if not (_is_lost(fault) or isinstance(fault, _told())):  # of a lost process its peer says that a connection is
            fault = experiment.lost() or fault
        if _is_lost(fault):
            raise RunStopped(_stopped(fault, experiment.trainer, environment["SKYRL_LOG_FILE"])) from error
        error.add_note(f"what the actors printed: {environment['SKYRL_LOG_FILE']}")
        raise
    finally:
        experiment.close()
        stop()
    return out


def _is_lost(fault: Exception) -> bool:
    """Whether a process, a node or room on a disk is missing, and not the program wrong, as where an engine refuses a request."""
    import aiohttp
    from ray import exceptions

    from isoexec.runtimes.skyrl.client import EngineCallFailed
    from isoexec.runtimes.skyrl.trainer import CheckpointNotWritten

    actors = (exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError, exceptions.OutOfMemoryError)
    refused = isinstance(fault, aiohttp.ClientResponseError) and 400 <= fault.status < 500
    return isinstance(fault, (*actors, aiohttp.ClientError, EngineCallFailed, CheckpointNotWritten)) and not refused


def _told() -> tuple[type[Exception], ...]:
    """What says itself why a run ends."""
    from isoexec.runtimes.skyrl.generator import RewardError
    from isoexec.runtimes.skyrl.mismatch import NotFinite, RolloutMismatch
    from isoexec.runtimes.skyrl.trainer import NothingToLearn

    return RewardError, RolloutMismatch, NotFinite, NothingToLearn


def _stopped(fault: Exception, trainer, log: str) -> str:
    step = 0 if trainer is None else trainer.global_step
    said = " ".join(str(fault).split())[:400]
    return f"step {step}: {type(fault).__name__}: {said}; {_advice(trainer)}; what the actors printed: {log}"


def _advice(trainer) -> str:
    saved = None if trainer is None else trainer.last_checkpoint()
    if saved is None:
        return "nothing was saved; start again"
    return f"{saved} is whole; start again with trainer.resume_mode=latest"


def contract_of(config: TrainConfig) -> ExecutionContract | None:
    """The contract of a run; None in the native arm.

    Args:
        config: resolved.
    """
    if config.isoexec.arm != "isoexec":
        return None
    contract = run_contract(config)
    return composed(contract) if config.isoexec.contract is None else contract
