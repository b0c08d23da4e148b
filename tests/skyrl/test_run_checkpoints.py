"""A run's checkpoints: whole or not there, and of this run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from isoexec.runtimes.skyrl.client import InferenceClient
from isoexec.runtimes.skyrl.config import ConfigError
from isoexec.runtimes.skyrl.steps import read_steps
from isoexec.runtimes.skyrl.stream import PromptStream
from tests.skyrl.prompts import Prompts


class Disk:
    """Saves one file for the policy, as the policy workers do; or fails half-way, as they do on a full disk."""

    def __init__(self):
        self.full = False

    def save_checkpoint(self, role, folder):
        from pathlib import Path

        Path(folder).mkdir(parents=True)
        (Path(folder) / "rank-0.safetensors").write_bytes(b"half")
        if self.full:
            raise OSError(28, "No space left on device")
        (Path(folder) / "rank-0.json").write_text("{}")

    def load_checkpoint(self, role, folder):
        self.loaded = folder


@pytest.fixture
def saving(tmp_path):
    """``saving(step=0, **section)`` -> a trainer that saves to and loads from a disk."""
    from skyrl.train.utils.trainer_utils import ResumeMode

    from isoexec.runtimes.skyrl.config import IsoExecConfig
    from isoexec.runtimes.skyrl.steps import StepLog
    from isoexec.runtimes.skyrl.trainer import Trainer

    disk = Disk()

    def trainer(step=0, contract="digest", mode=ResumeMode.LATEST, path=None, **section):
        made = Trainer.__new__(Trainer)
        made._own, made._contract, made.resume_mode = IsoExecConfig(**{"seed": 1, **section}), contract, mode
        made.global_step, made.dispatch, made.all_metrics = step, disk, {"sampled/reward": 1 / 3}
        made._steps = StepLog(tmp_path / "steps.jsonl")
        made.train_dataloader = PromptStream(Prompts(8), 2, seed=1)
        made.train_dataloader.taken = 3 * step
        made.inference_engine_client = InferenceClient(proxy_url="", server_urls=[], data_parallel_size=1)
        made.cfg = SimpleNamespace(
            trainer=SimpleNamespace(ckpt_path=str(tmp_path), max_ckpts_to_keep=2, max_training_steps=9, resume_path=path)
        )
        return made

    trainer.disk = disk
    return trainer


def test_a_checkpoint_is_whole_or_not_there(saving, tmp_path):
    from isoexec.runtimes.skyrl.trainer import CheckpointNotWritten

    assert saving().load_checkpoints() == (0, None)
    for step in (1, 2, 3):
        saving(step).save_checkpoints()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_2", "global_step_3", "latest_ckpt_global_step.txt"]
    saving.disk.full = True
    with pytest.raises(CheckpointNotWritten, match="global_step_4 was not written.*No space left.*make room"):
        saving(4).save_checkpoints()
    assert not list(tmp_path.glob(".*"))
    assert saving().last_checkpoint() == tmp_path / "global_step_3"
    resumed = saving()
    assert resumed.load_checkpoints() == (3, str(tmp_path / "global_step_3"))
    assert resumed._steps.resumed == {"step": 3, "reward": 1 / 3}
    assert resumed.inference_engine_client.weight_version == 3  # counts on from the run that it continues
    assert resumed.train_dataloader.taken == 9 and saving.disk.loaded == str(tmp_path / "global_step_3/policy")
    saving.disk.full = False
    (tmp_path / ".global_step_4.partial").mkdir()  # what a killed run leaves
    saving(4).save_checkpoints()
    assert not list(tmp_path.glob(".*")) and saving().load_checkpoints()[0] == 4


def test_a_new_run_does_not_take_an_older_runs_checkpoints_for_its_own(saving, tmp_path):
    from isoexec.runtimes.skyrl.trainer import _set_aside

    _set_aside(tmp_path)
    assert not list(tmp_path.iterdir())
    for step in (8, 9):
        saving(step).save_checkpoints()
    _set_aside(tmp_path)
    assert saving().last_checkpoint() is None and sorted(p.name for p in (tmp_path / "previous").glob("global*")) == [
        "global_step_8",
        "global_step_9",
    ]
    for step in (1, 2, 3):
        saving(step).save_checkpoints()
    assert saving().load_checkpoints()[0] == 3 and not (tmp_path / "global_step_1").exists()


def test_a_checkpoint_of_another_run_is_refused(saving, tmp_path):
    from skyrl.train.utils.trainer_utils import ResumeMode

    saving(2).save_checkpoints()
    with pytest.raises(ConfigError, match="seed: this run has 5, the checkpoint 1"):
        saving(seed=5).load_checkpoints()
    with pytest.raises(ConfigError, match="contract: this run has None"):
        saving(contract=None).load_checkpoints()
    with pytest.raises(ConfigError, match="resume_path.*nowhere"):
        saving(mode=ResumeMode.FROM_PATH, path="/nowhere/global_step_1").load_checkpoints()
    assert saving(mode=ResumeMode.FROM_PATH, path=str(tmp_path / "global_step_2")).load_checkpoints()[0] == 2
    assert saving(mode=ResumeMode.NONE).load_checkpoints() == (0, None)
    finished = saving()
    finished.cfg.trainer.max_training_steps = 2
    with pytest.raises(ConfigError, match="max_training_steps: expected more than the checkpoint's 2"):
        finished.load_checkpoints()
    assert read_steps(finished._steps.path) == [{"step": 2, "reward": 1 / 3}]  # it was stopped before that line was written
    (tmp_path / "global_step_2/trainer.json").write_text("{")
    with pytest.raises(ConfigError, match="global_step_2"):
        saving().load_checkpoints()
