"""Runs other than the one of the default suite: the native arm, and engines that do not share the policy's devices."""

from __future__ import annotations

import pytest

from isoexec.contract import ExecutionContract
from isoexec.runtimes.skyrl.steps import read_steps
from isoexec.train.compose import RECIPES
from tests.skyrl.long import takes_minutes

pytestmark = takes_minutes("each starts Ray, vLLM and Megatron: a minute of two cores")


@pytest.fixture
def steps(start):
    """``steps(name, *overrides)`` -> (lines of a run of two steps from a start checkpoint, its folder)."""

    def run(name, *overrides):
        run = start("trainer.max_training_steps=2", *overrides, checkpoint=RECIPES / "start" / name)
        assert run.end() == 0, run.text()
        lines = read_steps(run.out / "steps.jsonl")
        assert [line["step"] for line in lines] == [1, 2] and all(line["grad_norm"] > 0 for line in lines)
        return lines, run.out

    return run


@pytest.mark.parametrize("name", ["dense", "hybrid-moe"])
def test_the_native_arm_trains_and_its_tokens_differ(steps, name):
    lines, out = steps(name, "isoexec.arm=native")
    for line in lines:
        assert line["bit_equal"] < 1 and 0 < line["rollout_train_logprobs_abs_diff_max"] < 1
        assert line["first_minibatch_rollout_ratio_max"] > 1
    assert not (out / "contract.json").exists() and not list(out.glob("mismatch-*"))


def test_separate_engines_have_no_mismatch(steps):
    lines, out = steps("hybrid-moe", "trainer.placement.colocate_all=false")
    for line in lines:
        assert line["bit_equal"] == 1 and line["rollout_train_logprobs_abs_diff_max"] == 0
        assert line["first_minibatch_ratio_min"] == line["first_minibatch_ratio_max"] == 1
    assert any("tensors equal in the policy and 1 engines" in log.read_text() for log in (out / "logs").glob("*.log"))


@pytest.mark.parametrize("name", ["dense", "hybrid-moe"])
def test_engines_and_policies_of_two_ranks_have_no_mismatch(steps, name):
    """The ranks of the engine share out tensors and experts, those of the policy tensors, tokens and experts."""
    degrees = {"generator.inference_engine.tensor": 2, "trainer.policy.megatron_config.tensor_model": 2}
    if name == "hybrid-moe":
        degrees |= {"generator.inference_engine.expert": 2, "trainer.policy.megatron_config.expert_model": 2}
        degrees |= {"trainer.policy.megatron_config.expert_tensor": 1}
    asked = [f"{key}_parallel_size={degree}" for key, degree in degrees.items()]
    lines, out = steps(name, "trainer.placement.policy_num_gpus_per_node=2", *asked)
    for line in lines:
        assert line["bit_equal"] == 1 and line["rollout_train_logprobs_abs_diff_max"] == 0
        assert line["first_minibatch_ratio_min"] == line["first_minibatch_ratio_max"] == 1
    claims = ExecutionContract.from_json((out / "contract.json").read_text()).claims
    assert claims.engine_tp == claims.trainer_tp == 2 and claims.trainer_sp
    assert any("tensors equal in the policy and 2 engines" in log.read_text() for log in (out / "logs").glob("*.log"))
