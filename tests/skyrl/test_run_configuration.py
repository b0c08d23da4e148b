"""A run's configuration: fitted to the machine, and refused by name before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from isoexec.runtimes.skyrl.config import ConfigError, check_environment, resolve
from tests.skyrl.small_run import small_config


@pytest.fixture
def config(tmp_path):
    """``config(*overrides)`` -> content of a configuration that would run."""
    model = tmp_path / "model"
    model.mkdir()
    return lambda *overrides: small_config(model, tmp_path / "out", list(overrides))


def test_a_configuration_is_fitted_to_the_machine(config, tmp_path):
    found = resolve(config())
    assert found.trainer.seed == found.isoexec.seed == 7
    assert found.trainer.ckpt_path == str(tmp_path / "out/checkpoints") and found.trainer.algorithm.temperature == 0.7
    assert found.trainer.remove_microbatch_padding
    assert not resolve(config("isoexec.arm=native")).trainer.remove_microbatch_padding
    if not torch.cuda.is_available():
        assert not found.trainer.flash_attn and not found.generator.inference_engine.enable_ray_prometheus_stats


def test_the_native_arm_packs_nothing_on_a_gpu_either(config, monkeypatch):
    monkeypatch.setattr("isoexec.runtimes.skyrl.config.uses_gpus", lambda: True)
    assert not resolve(config("isoexec.arm=native")).trainer.remove_microbatch_padding
    assert resolve(config()).trainer.remove_microbatch_padding


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("isoexec.arm=other", "isoexec.arm: expected 'isoexec' or 'native', found 'other'"),
        ("isoexec.on_mismatch=ignore", "isoexec.on_mismatch"),
        ("isoexec.unknown=1", "unknown"),
        ("trainer.unknown=1", "unknown"),
        ("trainer.strategy=fsdp", "trainer.strategy"),
        ("trainer.max_training_steps=null", "trainer.max_training_steps"),
        ("trainer.policy.model.path=/nowhere", "trainer.policy.model.path"),
        ("trainer.policy_mini_batch_size=3", "divisible"),
        ("trainer.algorithm.advantage_estimator=none", "advantage_estimator"),
        ("data.train_data=[/nowhere.jsonl]", "data.train_data.*nowhere"),
        ("isoexec.contract=/nowhere.json", "isoexec.contract"),
        ("generator.sampling_params.top_p=0.9", "top_p: expected 1.0, found 0.9"),
        ("generator.sampling_params.top_k=5", "top_k"),
        ("generator.sampling_params.temperature=0.0", "temperature"),
        ("trainer.algorithm.temperature=1.0", "trainer.algorithm.temperature"),
        ("generator.inference_engine.enforce_eager=false", "enforce_eager"),
        ("trainer.remove_microbatch_padding=false", "remove_microbatch_padding"),
        ("generator.batched=true", "generator.batched"),
        ("generator.chat_template.name_or_path=qwen3_without_thinking", "chat_template.*tokenises responses anew"),
        ("trainer.policy.optimizer_config.scheduler=cosine", "scheduler: expected 'constant_with_warmup', found 'cosine'"),
        ("trainer.policy.optimizer_config.lr=-1e-6", "optimizer_config.lr: expected at least 0"),
        ("trainer.policy.optimizer_config.num_warmup_steps=6", "num_warmup_steps: expected 0 to 5, since the run's 3 steps make 6 updates"),
        ("trainer.fully_async.enabled=true", "trainer.fully_async.enabled: expected False, found True"),
    ],
)
def test_what_cannot_run_is_refused_by_name(config, override, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config(override))


def test_the_contract_comes_from_the_configuration_alone(config):
    found = resolve(config())
    check_environment(found, {})
    with pytest.raises(ConfigError, match="ISOEXEC_CONTRACT: expected unset"):
        check_environment(found, {"ISOEXEC_CONTRACT": "some.json"})


@pytest.fixture
def experiment(tmp_path_factory, tmp_path, monkeypatch):
    """``experiment(*overrides, rows=None)`` puts a run together, up to where Ray would start."""
    from isoexec.runtimes.skyrl.experiment import Experiment
    from isoexec.verify.checkpoint import make_checkpoint

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model = tmp_path_factory.getbasetemp() / "experiment-model"
    if not model.exists():
        make_checkpoint(model, num_hidden_layers=1)

    def make(*overrides, rows=None):
        content = small_config(model, tmp_path / "out", list(overrides))
        if rows is not None:
            Path(content["data"]["train_data"][0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Experiment(resolve(content), None)

    return make


def test_data_and_environment_are_looked_at_before_anything_starts(experiment):
    assert len(experiment().train_dataset) == 4
    for override, message in (
        ("isoexec.environments={parity: 'no_such_module:Env'}", "isoexec.environments.parity.*no_such_module"),
        ("isoexec.environments={parity: 'parity_env:Other'}", "isoexec.environments.parity.*Other"),
        ("environment.env_class=unheard_of", "environment.env_class.*unheard_of"),
        ("trainer.max_prompt_length=3", "data.train_data: no prompt of at most trainer.max_prompt_length = 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            experiment(override)
    with pytest.raises(ConfigError, match="data.train_data.*no column.*prompt"):
        experiment(rows=[{"question": "say 1"}])
