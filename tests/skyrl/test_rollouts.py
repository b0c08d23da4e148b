"""Tokens in, tokens out: what the generator makes of an engine's answers and of an environment's, without an engine."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace

import pytest
import skyrl_gym
from skyrl.train.generators.base import TrajectoryID
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import registry
from transformers import AutoTokenizer

from isoexec.contract import ContractError
from isoexec.runtimes.skyrl.config import resolve
from isoexec.runtimes.skyrl.generator import RewardError, SeededGenerator
from isoexec.train.compose import RECIPES
from tests.skyrl.small_run import small_config

NAME = "isoexec-rollout-test"


class Environment(BaseTextEnv):
    """Does with a response what its row says."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self._answer = extras["answer"]
        if self._answer is None:
            raise KeyError("paper")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={}, **self._answer(action))


class Engine:
    """Answers every prompt with the same tokens."""

    weight_version = 3

    def __init__(self, tokenizer, ids):
        self._tokenizer, self.ids, self.asked = tokenizer, ids, []

    async def generate(self, request, model=None):
        self.asked.append(copy.deepcopy(request))  # the generator goes on with the same list
        count = len(request["prompt_token_ids"])
        return {
            "responses": [self._tokenizer.decode(self.ids)] * count,
            "response_ids": [list(self.ids) for _ in range(count)],
            "response_logprobs": [[-0.5] * len(self.ids) for _ in range(count)],
            "stop_reasons": ["stop"] * count,
        }

    async def finish_session(self, session):
        pass


@pytest.fixture
def rollout(tmp_path):
    """``rollout(answer)`` -> (what the generator gives for one prompt, the engine that was asked)."""
    if registry.get(NAME) is None:
        skyrl_gym.register(id=NAME, entry_point=f"{__name__}:{Environment.__name__}")
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "start" / "dense")
    (tmp_path / "model").mkdir()
    config = resolve(small_config(tmp_path / "model", tmp_path / "out"))
    engine = Engine(tokenizer, [tokenizer.convert_tokens_to_ids(c) for c in "State"] + [tokenizer.eos_token_id])

    def run(answer=lambda action: {}):
        generator = SeededGenerator(
            generator_cfg=config.generator, skyrl_gym_cfg=config.environment.skyrl_gym, inference_engine_client=engine,
            tokenizer=tokenizer, policy_model_name="policy", run_seed=7,
        )  # fmt: skip
        batch = {
            "prompts": [[{"role": "user", "content": "State the answer"}]],
            "env_classes": [NAME],
            "env_extras": [{"answer": answer}],
            "sampling_params": {"temperature": 1.0, "logprobs": 1},
            "trajectory_ids": [TrajectoryID("0", 0)],
            "batch_metadata": SimpleNamespace(training_phase="train", global_step=2),
        }
        return asyncio.run(generator.generate(batch, disable_tqdm=True)), engine

    return run


def test_what_is_trained_on_are_the_tokens_that_were_sampled(rollout):
    found, engine = rollout()
    [request] = engine.asked
    assert found["response_ids"] == [engine.ids] and found["rollout_logprobs"] == [[-0.5] * len(engine.ids)]
    assert found["prompt_token_ids"] == request["prompt_token_ids"] and found["loss_masks"] == [[1] * len(engine.ids)]
    assert "3" in request["cache_salt"]  # the weight version
    # The tokenizer would have made others of their text.
    tokenizer = engine._tokenizer
    assert tokenizer.encode(tokenizer.decode(engine.ids[:-1])) != engine.ids[:-1]


def test_an_environment_that_rewrites_a_response_is_refused(rollout):
    with pytest.raises(ContractError, match="Environment.step: postprocessed_action: expected none, found 'state'.*not be those.*sampled"):
        rollout(lambda action: {"postprocessed_action": action.lower()[:5]})


def test_an_environment_that_raises_is_named(rollout):
    def answer(action):
        raise RuntimeError("out of paper")

    with pytest.raises(RewardError, match="environment Environment.step raised RuntimeError: out of paper; nothing is trained on"):
        rollout(answer)

    def refuse(action):
        raise ContractError("says all of it")

    with pytest.raises(ContractError, match="^says all of it$"):
        rollout(refuse)
    with pytest.raises(RewardError, match=f"environment {NAME} cannot be made: its constructor raised KeyError: 'paper'; nothing is"):
        rollout(None)
