"""A token whose logprob differs: counted over bits, named, kept, and the end of the run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from omegaconf import OmegaConf

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl import mismatch
from isoexec.runtimes.skyrl.generator import sample_seed


def test_equal_logprobs_are_equal_and_a_planted_ulp_is_not():
    torch.manual_seed(0)
    rollout, mask = -torch.rand(3, 5), torch.ones(3, 5)
    mask[1, 2] = 0
    found = mismatch.compare(rollout, rollout.clone(), mask)
    assert (found.tokens, found.equal, found.mean, found.max, found.std, found.first) == (14, 14, 0.0, 0.0, 0.0, None)
    assert found.bit_equal == 1.0
    planted = rollout.clone()
    planted.view(torch.int32)[2, 1] += 1
    found = mismatch.compare(rollout, planted, mask)
    assert (found.equal, found.first) == (13, (2, 1)) and found.max > 0 and found.mean > 0 and found.std > 0
    planted = rollout.clone()
    planted.view(torch.int32)[1, 2] += 1  # not trained on
    assert mismatch.compare(rollout, planted, mask).bit_equal == 1.0


def test_equality_is_of_bits():
    ones = torch.ones(1, 1)
    assert mismatch.compare(torch.zeros(1, 1), -torch.zeros(1, 1), ones).equal == 0
    nan = mismatch.compare(ones * torch.nan, ones * torch.nan, ones)
    assert nan.equal == 1 and nan.not_finite == (0, 0) and mismatch.compare(ones, ones, ones).not_finite is None
    with pytest.raises(TypeError, match="rollout.*bfloat16"):
        mismatch.compare(ones.bfloat16(), ones, ones)
    nothing = mismatch.compare(ones, ones + 1, torch.zeros(1, 1))
    assert (nothing.tokens, nothing.bit_equal, nothing.max) == (0, 1.0, 0.0)


def test_a_bundle_names_the_token_that_differs(tmp_path):
    rollout = torch.tensor([[-1.0, -2.0, 0.0]])
    trainer = rollout.clone()
    trainer.view(torch.int32)[0, 1] += 1
    batch = {
        "sequences": torch.tensor([[0, 11, 12, 21, 22, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0]]),
        "response_mask": torch.tensor([[1, 1, 0]]),
        "loss_mask": torch.tensor([[1.0, 1.0, 0.0]]),
        "rollout_logprobs": rollout,
        "action_log_probs": trainer,
    }
    found = mismatch.compare(rollout, trainer, batch["loss_mask"])
    said = mismatch.write_bundle(tmp_path / "found", batch, found, step=3)
    bundle = json.loads((tmp_path / "found/mismatch.json").read_text())
    assert "token 3 (id 22)" in said and bundle["differs_at"] == 3 and bundle["prompt_tokens"] == 2 and bundle["step"] == 3
    assert bundle["tokens"] == [11, 12, 21, 22] and bundle["tokens"][bundle["differs_at"]] == 22
    assert bundle["rollout_bits"][1] + 1 == bundle["trainer_bits"][1]


class Batch(dict):
    """Tensors by name, and metadata, as a batch of SkyRL."""

    metadata = {"uids": ["7", "7"]}


def step_batch(planted: int) -> Batch:
    """A step's batch of two responses; ``planted`` ulps are added to one of the trainer's logprobs."""
    rollout = -torch.rand(2, 3)
    trainer = rollout.clone()
    trainer.view(torch.int32)[1, 2] += planted
    return Batch(
        sequences=torch.arange(10).view(2, 5),
        attention_mask=torch.ones(2, 5),
        response_mask=torch.ones(2, 3),
        loss_mask=torch.ones(2, 3),
        rollout_logprobs=rollout,
        action_log_probs=trainer,
    )


@dataclasses.dataclass
class Engine:
    """What the trainer calls of an engine's client."""

    weight_version: int
    refuses: ClassVar[bool] = False

    async def call(self, method, path):
        if self.refuses:
            raise ContractError("sharded")
        Path(path).write_text(method)

    async def teardown(self):
        pass


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """``compared(batch, **section)`` -> metrics of a trainer that computed the batch's logprobs."""
    from skyrl.train.trainer import RayPPOTrainer

    from isoexec.runtimes.skyrl.config import IsoExecConfig
    from isoexec.runtimes.skyrl.trainer import Trainer

    monkeypatch.setattr(RayPPOTrainer, "fwd_logprobs_values_reward", lambda self, batch: batch)

    def compare(batch, **section):
        trainer = Trainer.__new__(Trainer)
        trainer._own = IsoExecConfig(out=str(tmp_path), **section)
        trainer.all_metrics, trainer.global_step, trainer._exported = {}, 5, False
        trainer.cfg = OmegaConf.create(
            {
                "generator": {"sampling_params": {"temperature": 0.7}, "inference_engine": {"enforce_eager": False}},
                "trainer": {"placement": {"colocate_all": True}},
            }
        )
        trainer.tokenizer, trainer.inference_engine_client = None, Engine(6)
        trainer.dispatch = SimpleNamespace(save_hf_model=lambda model, folder, tokenizer: (Path(folder) / model).mkdir(parents=True))
        (tmp_path / "contract.json").write_text("{}")
        assert trainer.fwd_logprobs_values_reward(batch) is batch
        return trainer.all_metrics

    return compare


def test_a_differing_token_stops_the_run(compared, tmp_path):
    assert compared(step_batch(0))["policy/rollout_train_bit_equal"] == 1.0
    with pytest.raises(mismatch.RolloutMismatch, match="step 5: 1 of 6 tokens differ.*sequence 1, token 4 .id 9"):
        compared(step_batch(1))
    folder = tmp_path / "mismatch-5"
    bundle = json.loads((folder / "mismatch.json").read_text())
    assert (bundle["step"], bundle["weight_version"], bundle["sequence"]) == (5, 6, 1)
    assert bundle["seed"] == sample_seed(None, "train", 5, "7", 1)
    assert (folder / "engine.safetensors").read_text() == "isoexec_save_weights" and (folder / "trainer/policy").is_dir()
    assert (folder / "contract.json").read_text() == "{}" and bundle["engine_slept"] is False and bundle["captured"]


def test_an_engine_that_sleeps_is_not_asked_for_the_weights_that_it_gave_up(compared, tmp_path, monkeypatch):
    monkeypatch.setattr("isoexec.runtimes.skyrl.trainer.uses_gpus", lambda: True)
    with pytest.raises(mismatch.RolloutMismatch, match="1 of 6 tokens differ"):
        compared(step_batch(1))
    folder = tmp_path / "mismatch-5"
    assert json.loads((folder / "mismatch.json").read_text())["engine_slept"] is True
    assert (folder / "trainer/policy").is_dir() and not (folder / "engine.safetensors").exists()


def test_weights_that_cannot_be_kept_do_not_hide_the_mismatch(compared, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "refuses", True)
    with pytest.raises(mismatch.RolloutMismatch, match="1 of 6 tokens differ"):
        compared(step_batch(1))
    assert not (tmp_path / "mismatch-5/engine.safetensors").exists()


def test_a_differing_token_warns_where_it_is_told_to(compared, tmp_path):
    metrics = compared(step_batch(1), on_mismatch="warn")
    assert metrics["policy/rollout_train_bit_equal"] == 5 / 6 and metrics["policy/rollout_train_logprobs_abs_diff_max"] > 0
    shutil.rmtree(tmp_path / "mismatch-5")
    assert compared(step_batch(1), arm="native")["policy/rollout_train_bit_equal"] == 5 / 6
    assert not (tmp_path / "mismatch-5").exists()


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("section", [{}, {"on_mismatch": "warn"}, {"arm": "native"}])
def test_a_logprob_that_is_not_finite_stops_the_run_though_both_sides_have_its_bits(compared, value, section):
    batch = step_batch(0)
    for side in ("rollout_logprobs", "action_log_probs"):
        batch[side][1, 0] = value
    with pytest.raises(mismatch.NotFinite, match=f"step 5: logprob of sequence 1, response token 0.*found {value} by.*and {value} by"):
        compared(batch, **section)
    batch["loss_mask"][1, 0] = 0  # not trained on
    compared(batch, **section)
