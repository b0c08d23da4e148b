"""A DAPO run from its configuration to its last step."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig

from isoexec.contract import ContractError, ExecutionContract
from isoexec.contract.build import contract_for_model
from isoexec.runtimes.compose import composed
from isoexec.runtimes.skyrl.config import ConfigError, TrainConfig, check_environment, resolve, uses_gpus


def train(config: TrainConfig | DictConfig | dict) -> Path:
    """Train, and write one JSON line per step.

    Args:
        config: SkyRL's configuration with a section ``isoexec`` (:class:`~isoexec.runtimes.skyrl.config.IsoExecConfig`).

    Returns:
        The folder with ``steps.jsonl``, ``contract.json`` (isoexec arm), checkpoints and logs.

    Raises:
        ConfigError: a setting or the data cannot be used; nothing has started.
        ContractError: the two sides need not compute the same bits; nothing has been trained on.
        RolloutMismatch: a token's two logprobs differ.
    """
    config = resolve(config)
    check_environment(config, os.environ)
    import ray  # a fault of the configuration is found before these imports are paid for

    from isoexec.runtimes.skyrl import cluster
    from isoexec.runtimes.skyrl.experiment import Experiment

    out = Path(config.isoexec.out)
    out.mkdir(parents=True, exist_ok=True)
    contract = _contract(config, out) if config.isoexec.arm == "isoexec" else None
    file = None if contract is None else out / "contract.json"
    experiment = Experiment(config, None if contract is None else contract.digest)
    environment = cluster.actor_environment(config, file)
    cluster.start(config, environment)
    try:
        experiment.run()
    except ray.exceptions.RayTaskError as error:  # of an actor: the fault itself, without the frames that it travelled through
        if isinstance(error.cause, ContractError | ConfigError):
            raise error.cause from None
        error.add_note(f"what the actors printed: {environment['SKYRL_LOG_FILE']}")
        raise
    finally:
        experiment.close()
        ray.shutdown()
    return out


def _contract(config: TrainConfig, out: Path) -> ExecutionContract:
    """The run's contract, written to ``out/contract.json``."""
    if config.isoexec.contract is not None:
        contract = ExecutionContract.from_json(Path(config.isoexec.contract).read_text(encoding="utf-8"))
    else:
        contract = composed(contract_for_model(config.trainer.policy.model.path, "cuda" if uses_gpus() else "cpu"))
    (out / "contract.json").write_text(contract.to_json(), encoding="utf-8")
    return contract
