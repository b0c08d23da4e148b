"""What refuses a run before it writes anything: its environment, the Ray cluster that it would join, the checkpoint to continue."""

from __future__ import annotations

import os
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl import resume
from isoexec.runtimes.skyrl.address import answering
from isoexec.runtimes.skyrl.config import ConfigError, TrainConfig, check_environment, check_numbers, resolve
from isoexec.runtimes.skyrl.run import contract_of
from isoexec.runtimes.skyrl.steps import StepLog
from isoexec.train import data
from isoexec.train.section import recipe_section


def check_start(composed: DictConfig, folder: Path) -> str | None:
    """Look at what :func:`isoexec.train.check.prepare` does not, without writing into the run's folder.

    Args:
        composed: of a recipe and overrides.
        folder: where the data of a task is drawn; what lies in the run's own folder may be another's.

    Returns:
        What is to be told, or None.

    Raises:
        Finished: the checkpoint has nothing left to do; its line is in ``steps.jsonl``.
        ContractError: the run would be refused, in one line.
    """
    try:
        check_environment(composed, os.environ)
        if composed.isoexec.ray_address is not None:
            answering(composed.isoexec.ray_address)
        if composed.trainer.resume_mode in (None, "none"):
            return None
        return _check_resume(composed, folder)
    except resume.Finished:
        raise
    except ConfigError as error:
        raise ContractError(" ".join(str(error).split())) from error


def _check_resume(composed: DictConfig, folder: Path) -> str | None:
    config = _resolved(composed, folder)
    contract = contract_of(config)
    wanted = resume.identity(config, None if contract is None else contract.digest)
    try:
        if resume.judge(config.trainer, wanted) is not None:
            return None
    except resume.Finished as error:
        if error.line is not None:  # a run may have been stopped between its last checkpoint and the line
            StepLog(Path(config.isoexec.out) / "steps.jsonl").complete(error.line)
        raise
    return f"trainer.resume_mode={config.trainer.resume_mode}: no checkpoint in {config.trainer.ckpt_path}; starting from the first step"


def _resolved(composed: DictConfig, folder: Path) -> TrainConfig:
    plain = OmegaConf.to_container(composed, resolve=True)
    check_numbers(plain)
    recipe = recipe_section(plain.pop("recipe"))
    if recipe.task is not None:
        train, held_out = data.write_task(recipe.task, plain["isoexec"]["seed"], folder)
        plain["data"]["train_data"], plain["data"]["val_data"] = [str(train)], [str(held_out)]
    return resolve(plain)
