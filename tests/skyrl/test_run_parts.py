"""What a run is put together from, without Ray and without a model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl import steps, tensors
from isoexec.runtimes.skyrl.client import InferenceClient
from isoexec.runtimes.skyrl.config import ConfigError
from isoexec.runtimes.skyrl.dapo import overlong_penalty
from isoexec.runtimes.skyrl.stream import PromptStream
from tests.skyrl.prompts import Prompts


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
        samples = [await self.agent_loop(sampling_params=batch["sampling_params"], trajectory_id=i) for i in ids]
        return {"samples": samples, "rewards": [1.0] * len(samples)}

    monkeypatch.setattr(SkyRLGymGenerator, "agent_loop", agent_loop)
    monkeypatch.setattr(SkyRLGymGenerator, "generate", generate)
    monkeypatch.setattr(SkyRLGymGenerator, "__init__", lambda self: None)

    def seeds(run, phase, step, temperature=1.0):
        batch = {
            "sampling_params": {"temperature": temperature, "logprobs": 1, "min_tokens": 1},
            "batch_metadata": SimpleNamespace(training_phase=phase, global_step=step),
        }
        generator = SeededGenerator(run_seed=run)
        output = asyncio.run(generator.generate(batch))
        assert generator.evaluated == (output["rewards"] if phase == "eval" else [])
        return output["samples"]

    def of(*key):
        return [params["seed"] for params in seeds(*key)]

    assert len(set(of(1, "train", 1) + of(1, "train", 2) + of(2, "train", 1) + of(1, "eval", 1))) == 4 * 6
    assert of(1, "train", 1) == of(1, "train", 1) and of(1, "eval", 1) == of(1, "eval", 5)
    assert all(params["min_tokens"] == 0 for params in seeds(1, "train", 1))
    greedy = seeds(1, "eval", 0, temperature=0.0)
    assert all("seed" not in params and "logprobs" not in params for params in greedy)


def test_the_pass_rate_of_an_evaluation_is_the_share_of_full_marks(monkeypatch):
    from skyrl.train.trainer import RayPPOTrainer

    from isoexec.runtimes.skyrl.trainer import Trainer
    from isoexec.train.report import held_out

    async def evaluate(self):
        self.generator.evaluated += [0.99, 1.0, [0.0, 1.0], -1.0]
        return {"eval/all/mean_positive_reward": 0.7475}

    monkeypatch.setattr(RayPPOTrainer, "eval", evaluate)
    trainer = Trainer.__new__(Trainer)
    trainer.generator = SimpleNamespace(evaluated=[0.0])  # of an evaluation before
    line = steps.step_line(0, asyncio.run(trainer.eval()))
    assert held_out(line) == 0.5 and line["eval"]["all/mean_positive_reward"] == 0.7475


def test_an_environment_reads_a_response_without_the_tokens_that_end_it():
    from transformers import AutoTokenizer

    from isoexec.train.compose import RECIPES

    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "start/dense")
    ids = tokenizer("-12").input_ids + [tokenizer.eos_token_id]
    client = InferenceClient(proxy_url="", server_urls=[], data_parallel_size=1, tokenizer=tokenizer)
    assert asyncio.run(client.detokenize([ids])) == ["-12"] and tokenizer.decode(ids) != "-12"


@pytest.mark.parametrize("status, body, lost", [(502, "no engine", True), (503, '{"error": {}}', True), (400, '{"error": {}}', False)])
def test_an_engine_that_is_gone_is_told_from_one_that_refuses(monkeypatch, status, body, lost):
    from aiohttp import web
    from aiohttp.test_utils import TestServer
    from skyrl.backends.skyrl_train.inference_servers import remote_inference_client

    from isoexec.runtimes.skyrl.run import _is_lost

    monkeypatch.setattr(remote_inference_client, "_DATA_PLANE_RETRIES", 1)

    async def answer(request):
        return web.Response(status=status, text=body)

    async def ask():
        app = web.Application()
        app.router.add_post("/generate", answer)
        async with TestServer(app) as server:
            client = InferenceClient(proxy_url="", server_urls=[], data_parallel_size=1)
            try:
                await client._post(str(server.make_url("/generate")), {})
            finally:
                await client.teardown()

    with pytest.raises(Exception) as raised:  # noqa: PT011
        asyncio.run(ask())
    assert _is_lost(raised.value) == lost, raised.value


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
    log.resumed = {"step": 2, "reward": 0.5}  # of its checkpoint, which its line came to the disk before
    log.on_train_start(trainer, at(2), None)
    assert steps.read_steps(path) == lines[:2]
    log.resumed = {"step": 3, "reward": 0.5}  # stopped before the line was written
    log.on_train_start(trainer, at(3), None)
    assert steps.read_steps(path) == [*lines[:2], log.resumed]
    log.resumed = None
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


@pytest.mark.parametrize(("ending", "status"), [(False, 1), (True, 0)])
def test_a_process_ends_with_what_it_cannot_do_without(ending, status):
    program = f"""
import subprocess, sys, threading, time
import psutil
from isoexec.runtimes.skyrl import follow

follow._SECONDS = 0.05
child, meant = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE), threading.Event()
follow.end_with([psutil.Process(child.pid)], meant)
time.sleep(0.3)  # it lives, and so does this process
print("both", flush=True)
if {ending}:
    meant.set()
child.kill()
time.sleep(1 if {ending} else 30)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=25)
    assert (run.returncode, run.stdout) == (status, "both\n"), run.stderr
    assert ("cannot do without" in run.stderr) is not ending
