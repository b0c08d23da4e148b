"""What a run is put together from, without Ray and without a model."""

from __future__ import annotations

import asyncio
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
from isoexec.runtimes.skyrl import mismatch, steps, tensors
from isoexec.runtimes.skyrl.client import InferenceClient
from isoexec.runtimes.skyrl.config import ConfigError, check_environment, resolve
from isoexec.runtimes.skyrl.dapo import overlong_penalty
from isoexec.runtimes.skyrl.generator import sample_seed
from isoexec.runtimes.skyrl.stream import PromptStream
from tests.skyrl.small_run import small_config


class Prompts:
    """As many prompts as asked for, in place of SkyRL's dataset."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, i):
        return i

    def collate_fn(self, rows):
        return [{"prompt": i, "env_class": None, "env_extras": {}, "uid": str(i)} for i in rows]


def uids(stream, batches):
    iterator = iter(stream)
    return [[prompt["uid"] for prompt in next(iterator)] for _ in range(batches)]


def test_an_epoch_takes_each_prompt_once_and_the_next_in_another_order():
    batches = uids(PromptStream(Prompts(8), 2, seed=1), 8)
    first, second = ([uid for batch in epoch for uid in batch] for epoch in (batches[:4], batches[4:]))
    assert sorted(first) == [f"{i}@0" for i in range(8)] and sorted(second) == [f"{i}@1" for i in range(8)]
    assert [u[:-2] for u in first] != [u[:-2] for u in second]


def test_a_stream_resumes_at_its_position_and_another_seed_is_another_order():
    whole = uids(PromptStream(Prompts(8), 3, seed=1), 7)
    begun = PromptStream(Prompts(8), 3, seed=1)
    uids(begun, 3)
    resumed = PromptStream(Prompts(8), 3, seed=1)
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert uids(resumed, 4) == whole[3:]
    assert uids(PromptStream(Prompts(8), 3, seed=2), 7) != whole


def test_too_few_prompts_are_refused():
    with pytest.raises(ConfigError, match="train_batch_size = 4.*found 3"):
        PromptStream(Prompts(3), 4, seed=1)


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
    assert mismatch.compare(ones * torch.nan, ones * torch.nan, ones).equal == 1
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


@pytest.mark.parametrize(("length", "expected"), [(1, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (25, -1.0)])
def test_overlong_responses_are_punished_softly(length, expected):
    assert overlong_penalty(length, longest=20, buffer=4, factor=1.0) == expected
    assert overlong_penalty(length, longest=20, buffer=4, factor=0.5) == expected / 2
    assert overlong_penalty(length, longest=20, buffer=0, factor=1.0) == 0.0


def test_every_sample_has_a_seed_of_its_own(monkeypatch):
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

    from isoexec.runtimes.skyrl.generator import SeededGenerator

    async def agent_loop(self, *args, sampling_params=None, **kwargs):
        return sampling_params

    async def generate(self, batch, disable_tqdm=False):
        ids = [SimpleNamespace(instance_id=f"{p}", repetition_id=r) for p in range(3) for r in range(2)]
        return [await self.agent_loop(sampling_params=batch["sampling_params"], trajectory_id=i) for i in ids]

    monkeypatch.setattr(SkyRLGymGenerator, "agent_loop", agent_loop)
    monkeypatch.setattr(SkyRLGymGenerator, "generate", generate)
    monkeypatch.setattr(SkyRLGymGenerator, "__init__", lambda self: None)

    def seeds(run, phase, step, temperature=1.0):
        batch = {
            "sampling_params": {"temperature": temperature, "logprobs": 1, "min_tokens": 1},
            "batch_metadata": SimpleNamespace(training_phase=phase, global_step=step),
        }
        return asyncio.run(SeededGenerator(run_seed=run).generate(batch))

    def of(*key):
        return [params["seed"] for params in seeds(*key)]

    assert len(set(of(1, "train", 1) + of(1, "train", 2) + of(2, "train", 1) + of(1, "eval", 1))) == 4 * 6
    assert of(1, "train", 1) == of(1, "train", 1) and of(1, "eval", 1) == of(1, "eval", 5)
    assert all(params["min_tokens"] == 0 for params in seeds(1, "train", 1))
    greedy = seeds(1, "eval", 0, temperature=0.0)
    assert all("seed" not in params and "logprobs" not in params for params in greedy)


def test_an_environment_reads_a_response_without_the_tokens_that_end_it():
    from transformers import AutoTokenizer

    from isoexec.train.compose import RECIPES

    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "start/dense")
    ids = tokenizer("-12").input_ids + [tokenizer.eos_token_id]
    client = InferenceClient(proxy_url="", server_urls=[], data_parallel_size=1, tokenizer=tokenizer)
    assert asyncio.run(client.detokenize([ids])) == ["-12"] and tokenizer.decode(ids) != "-12"


def test_a_line_holds_the_step_at_full_precision(tmp_path):
    logs = {"sampled/reward": 1 / 3, "policy/final_loss": 1e-17, "timing/generate": 2.5, "eval/all/avg_score": 0.1, "other": 1}
    path = tmp_path / "steps.jsonl"
    log = steps.StepLog(path)
    trainer, at = None, lambda step, logs=None: SimpleNamespace(global_step=step, logs=logs)
    log.on_train_start(trainer, at(0), None)
    for step in (1, 2, 3):
        log.on_log(trainer, at(step, logs), None)
    path.write_text(path.read_text() + '{"step": 4, "rew')  # killed while it wrote
    lines = steps.read_steps(path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["reward"] == 1 / 3 and lines[0]["loss"] == 1e-17
    assert lines[0]["seconds"] == {"generate": 2.5} and lines[0]["eval"] == {"all/avg_score": 0.1}
    log.on_train_start(trainer, at(2), None)  # resumed after step 2
    assert [line["step"] for line in steps.read_steps(path)] == [1, 2]
    log.on_train_start(trainer, at(0), None)
    assert steps.read_steps(path) == []


def test_tensors_are_written_whole(tmp_path):
    master = torch.arange(4.0)
    stored = {
        "a": torch.arange(6).view(2, 3).t(),
        "b": torch.tensor([1.5], dtype=torch.bfloat16),
        "c": master,
        "d": master,
        "e": master[:2],
    }
    tensors.write_tensors(tmp_path / "t.safetensors", stored)
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]
    read = dict(tensors.read_tensors(tmp_path / "t.safetensors"))
    assert read.keys() == stored.keys() and all(torch.equal(read[name], stored[name]) for name in stored)
    assert read["b"].dtype == torch.bfloat16


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
    if not torch.cuda.is_available():
        assert not found.trainer.flash_attn and not found.generator.inference_engine.enable_ray_prometheus_stats
        assert not resolve(config("isoexec.arm=native")).trainer.remove_microbatch_padding


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
        trainer.cfg = OmegaConf.create({"generator": {"sampling_params": {"temperature": 0.7}}})
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
    assert (folder / "contract.json").read_text() == "{}"


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


def test_every_token_of_a_step_is_of_one_weight_version(monkeypatch):
    from skyrl.train.trainer import RayPPOTrainer

    from isoexec.runtimes.skyrl.trainer import Trainer

    client = InferenceClient(proxy_url="", server_urls=[], data_parallel_size=1)

    async def sample(self, batch):
        if batch == "and sync":
            client.increment_weight_version()
        return {"rewards": [1.0]}

    monkeypatch.setattr(RayPPOTrainer, "generate", sample)
    trainer = Trainer.__new__(Trainer)
    trainer.inference_engine_client, trainer.all_metrics, trainer.global_step = client, {}, 1
    client.increment_weight_version()
    for _ in range(2):  # dynamic sampling takes several batches
        asyncio.run(trainer.generate("a batch"))
    assert trainer.all_metrics == {"sampled/weight_version": 1}
    with pytest.raises(ContractError, match="expected 1 for every token, found 1 before.*and 2 after"):
        asyncio.run(trainer.generate("and sync"))
    with pytest.raises(ContractError, match="expected 1 for every token, found 2 before"):
        asyncio.run(trainer.generate("a batch"))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None, [0.0, float("nan")]])
def test_a_reward_that_is_no_number_is_refused(reward):
    from isoexec.runtimes.skyrl.trainer import RewardError, _check_rewards

    _check_rewards([0.0, 1, [0.5, 0.5]])
    with pytest.raises(RewardError, match="reward of response 1"):
        _check_rewards([0.0, reward])


def test_batches_of_which_no_group_is_kept_are_sampled_again():
    from isoexec.runtimes.skyrl.trainer import NothingToLearn, Trainer

    def batch(*rewards):
        rows = [[7]] * len(rewards)
        return {
            "prompt_token_ids": rows, "response_ids": rows, "rewards": list(rewards), "loss_masks": [[1]] * len(rewards),
            "rollout_logprobs": [[-1.0]] * len(rewards), "stop_reasons": None, "rollout_metrics": {},
        }  # fmt: skip

    trainer = Trainer.__new__(Trainer)
    trainer._sampled, trainer._batches, trainer.dynamic_sampling_state, trainer.global_step = [], 0, None, 3
    sampling = SimpleNamespace(type="filter", max_sample_batches=5, min_replace_ratio=0.3)
    trainer.cfg = SimpleNamespace(
        trainer=SimpleNamespace(algorithm=SimpleNamespace(dynamic_sampling=sampling), train_batch_size=2),
        generator=SimpleNamespace(n_samples_per_prompt=2),
    )
    uids = ["a", "a", "b", "b"]
    for rewards in ((0.0, 0.0, 1.0, 1.0), ([0.0, 1.0], [1.0, 0.0], 0.0, 0.0), (1.0, 0.0, 0.0, 0.0)):
        assert trainer.handle_dynamic_sampling(batch(*rewards), uids)[2]
    output, kept, again = trainer.handle_dynamic_sampling(batch(0.0, 0.0, 0.0, 1.0), ["c", "c", "d", "d"])
    assert not again and kept == ["a", "a", "d", "d"] and output["rewards"] == [1.0, 0.0, 0.0, 1.0]
    assert trainer.dynamic_sampling_state is None and trainer._batches == 4
    for _ in range(4):
        trainer.handle_dynamic_sampling(batch(0.0, 0.0, 1.0, 1.0), uids)
    with pytest.raises(NothingToLearn, match="step 3: 5 batches.*max_sample_batches"):
        trainer.handle_dynamic_sampling(batch(0.0, 0.0, 1.0, 1.0), uids)


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
    assert len(experiment().train_dataset) == 16
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
    from isoexec.runtimes.skyrl.trainer import Trainer

    disk = Disk()

    def trainer(step=0, contract="digest", mode=ResumeMode.LATEST, path=None, **section):
        made = Trainer.__new__(Trainer)
        made._own, made._contract, made.resume_mode = IsoExecConfig(**{"seed": 1, **section}), contract, mode
        made.global_step, made.dispatch = step, disk
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
    (tmp_path / "global_step_2/trainer.json").write_text("{")
    with pytest.raises(ConfigError, match="global_step_2"):
        saving().load_checkpoints()
