"""Real SkyRL over real Ray: vLLM samples, Megatron trains, and no bit differs at any step.

One run for all: what it would show of each claim is planted in its model and its prompts.
"""

from __future__ import annotations

import pickle
import runpy
from pathlib import Path

import pytest

from isoexec.runtimes.skyrl.steps import read_steps
from tests.skyrl.started import digests, listens

pytestmark = pytest.mark.timeout(1800)

STEPS = 3


@pytest.fixture(scope="module")
def watched(start):
    """(folder of a run from start to end; name -> addresses on which its processes listened after a step; the engine's environment)."""
    run = start(f"trainer.max_training_steps={STEPS}")
    run.wait_for_step(1)
    commands = run.processes()
    listening = {command: listens(pid) for pid, command in commands.items()}
    engine = Path(f"/proc/{run.process('EngineCore')}/environ").read_bytes().decode().split("\0")
    assert run.end() == 0, run.text()
    assert not run.left(), run.left(0)
    return run.out, listening, engine


@pytest.fixture(scope="module")
def whole(watched):
    return watched[0]


def test_no_token_differs_at_any_step(whole):
    lines = read_steps(whole / "steps.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert [line[f"rollout_train_logprobs_abs_diff_{moment}"] for moment in ("mean", "max", "std")] == [0.0, 0.0, 0.0]
        assert line["bit_equal"] == 1.0 and line["tokens"] > 4 * 4 * 4
        assert line["first_minibatch_ratio_min"] == line["first_minibatch_ratio_max"] == 1.0
        assert line["first_minibatch_rollout_ratio_min"] == line["first_minibatch_rollout_ratio_max"] == 1.0
        assert line["first_minibatch_clip_fraction"] == 0.0 and line["weight_version"] == line["step"]
        assert {"generate", "train", "sync", "step"} <= line["seconds"].keys()
    assert not list(whole.glob("mismatch-*"))


def test_the_weights_of_every_sync_are_compared_after_sleep_and_wake(whole):
    [log] = (whole / "logs").glob("infra-*.log")
    lines = log.read_text().splitlines()
    equal = [n for n, line in enumerate(lines) if "tensors equal in the policy and 1 engines" in line]
    assert len(equal) == STEPS + 1  # before the first step too
    versions = [lines[n].split("weights ")[1].split(":")[0] for n in equal]
    assert len(set(versions)) == STEPS + 1
    # vLLM's worker says on a CPU that it was told to sleep, and to wake: its weights and its cache, for the comparison in between.
    told = [n for n, line in enumerate(lines) if "sleep mode is not supported on CPU" in line]
    assert all(sum(n < first for n in told) == 3 * i + 2 for i, first in enumerate(equal[1:]))


def test_the_policy_trains(whole):
    lines = read_steps(whole / "steps.jsonl")
    assert all(line["grad_norm"] > 0 and 0 < line["reward"] < 1 for line in lines)
    first, last = (digests(whole / f"checkpoints/global_step_{n}/policy") for n in (STEPS - 1, STEPS))
    assert first.keys() == last.keys() and all(first[name] != last[name] for name in first)


def test_nothing_in_a_checkpoint_is_pickled(whole):
    assert {file.suffix for file in (whole / "checkpoints").rglob("*") if file.is_file()} == {".safetensors", ".json", ".txt"}


def test_remote_code_and_pickled_weights_of_a_checkpoint_are_never_run(whole, model):
    ran = model / "ran"
    assert not ran.exists()
    for run in (lambda: runpy.run_path(str(model / "remote.py")), lambda: pickle.loads((model / "pytorch_model.bin").read_bytes())):
        run()  # the traps work
        assert ran.exists()
        ran.unlink()


def test_an_engine_unpickles_nothing_that_is_sent_to_it(watched):
    _, _, environment = watched
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in environment
    assert not [entry for entry in environment if entry.startswith(("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ALLOW_RUNTIME_LORA"))]


def test_servers_listen_on_the_loopback_interface_alone(watched):
    _, listening, _ = watched
    assert all(address.is_loopback for addresses in listening.values() for address in addresses), listening
    for name in ("gcs_server", "raylet/raylet", "ray::EngineActor", "ray::_PolicyActor", "ray::Functions", "small_run.py"):
        assert any(addresses for command, addresses in listening.items() if name in command), (name, listening)
