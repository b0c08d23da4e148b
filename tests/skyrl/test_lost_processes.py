"""A run that loses a process, its disk or its rewards stops, says so, leaves nothing running, and goes on bit for bit.

One run is stopped in every way, one after the other, and resumed after each; at its end it is the run that was never stopped. The tests of
this file follow each other.
"""

from __future__ import annotations

import os
import resource
import signal

import pytest

from isoexec.runtimes.skyrl.steps import read_steps
from isoexec.train.compose import RECIPES
from tests.skyrl.long import takes_minutes
from tests.skyrl.started import digests, numbers

pytestmark = takes_minutes("each test starts Ray, vLLM and Megatron anew: a minute of two cores")

#: Timers of SkyRL, in the order of a step.
PHASES = ("generate", "fwd_logprobs_values_reward", "train_critic_and_policy", "save_checkpoints", "sync_weights")
#: More than all the runs that are stopped take, so that something is left for the last.
STEPS = 8


@pytest.fixture(scope="module")
def go(start):
    """``go(out=None, **environment)`` -> a run of the hybrid mixture of experts, or what is left to do of it."""
    steps = f"trainer.max_training_steps={STEPS}"
    return lambda out=None, **environment: start(steps, out=out, checkpoint=RECIPES / "start/hybrid-moe", **environment)


@pytest.fixture(scope="module")
def whole(go):
    """Folder of a run that is never stopped."""
    run = go()
    assert run.end() == 0, run.text()
    assert not run.left(), run.left(0)
    return run.out


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """Folder of the run that is stopped again and again."""
    return tmp_path_factory.mktemp("stopped")


def stopped(run, *said: str) -> None:
    """The run ended by itself with a message, and left nothing."""
    status = run.end()
    assert status not in (0, -signal.SIGKILL), run.text()
    for words in said:
        assert words in run.said(), run.text()
    assert not run.left(), run.left(0)


@pytest.mark.parametrize(
    "reward, said",
    [("nan", "RewardError: reward of response"), ("one", "RewardError: environment ParityEnv.step raised ValueError: could not convert")],
)
def test_a_reward_that_is_no_number_stops_the_run(go, out, reward, said):
    run = go(out, ISOEXEC_TEST_REWARD=reward)
    stopped(run, said)
    assert not read_steps(out / "steps.jsonl") and not list((out / "checkpoints").glob("global_step_*"))


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_may_be_killed_at_any_point_of_a_step(go, out, phase):
    run = go(out)
    run.wait_for_phase(phase)
    run.driver.send_signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    assert not run.left(), run.left(0)


@pytest.mark.parametrize(
    "name, phase",
    [("EngineCore", "generate"), ("ray::EngineActor", "generate"), ("ray::_PolicyActor", PHASES[2]), ("/raylet/raylet ", PHASES[1])],
)
def test_a_killed_process_stops_the_run(go, out, name, phase):
    run = go(out)
    run.wait_for_phase(phase)
    os.kill(run.process(name), signal.SIGKILL)
    stopped(run, "RunStopped", "global_step_", "is whole; start again with trainer.resume_mode=latest")


def test_a_full_disk_leaves_the_last_checkpoint(go, out):
    run = go(out)
    run.wait_for_phase("generate")
    [newest] = sorted((out / "checkpoints").glob("global_step_*"))[-1:]
    checkpoint = newest / "policy/rank-0.safetensors"
    # Weights on their way to the engine are less than half of what a checkpoint holds.
    limit = checkpoint.stat().st_size // 2, resource.RLIM_INFINITY
    resource.prlimit(run.process("ray::_PolicyActor"), resource.RLIMIT_FSIZE, limit)
    stopped(run, "was not written", "make room for it", "is whole; start again with trainer.resume_mode=latest")
    assert not list((out / "checkpoints").glob(".*"))


def test_what_was_stopped_and_resumed_is_bitwise_the_run_that_was_not(go, out, whole):
    run = go(out)
    assert run.end() == 0, run.text()
    assert numbers(out) == numbers(whole)
    assert digests(out / "checkpoints") == digests(whole / "checkpoints")  # moments of the gradients included
