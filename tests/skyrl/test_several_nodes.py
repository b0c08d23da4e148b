"""The recipe of several nodes on a Ray cluster of two, both on this machine, with a policy rank and an engine on each."""

from __future__ import annotations

import os

import pytest

from isoexec.runtimes.skyrl.steps import read_steps
from tests.skyrl.long import takes_minutes
from tests.skyrl.started import digests, numbers

pytestmark = takes_minutes("two engines and two policy ranks on two cores take some minutes")

STEPS = 2
#: The recipe on a small task.
SMALL = (
    "model=tiny-hybrid-moe", "task=chain_sum", "hardware=cpu-nodes", f"trainer.max_training_steps={STEPS}", "trainer.train_batch_size=4",
    "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=4", "trainer.algorithm.overlong_buffer_len=2",
    "trainer.eval_before_train=false", "trainer.eval_interval=-1", "trainer.micro_train_batch_size_per_gpu=4",
    "trainer.micro_forward_batch_size_per_gpu=4", "trainer.ckpt_interval=1", "trainer.resume_mode=latest", "trainer.max_ckpts_to_keep=-1",
    "trainer.policy.optimizer_config.num_warmup_steps=0", "recipe.task.train=64",
    "recipe.task.held_out=16", "generator.inference_engine.max_num_seqs=16",
)  # fmt: skip


class Cluster:
    """Two nodes, each with one process to give."""

    def __init__(self):
        self._started = 0
        self.head = self._node(None)
        self.other = self._node(self.head.address)

    def _node(self, head: str | None):
        from isoexec.runtimes.skyrl.node import LocalNode

        self._started += 1
        return LocalNode(f"127.60.{os.getpid() % 256}.{self._started}", gpus=1, cpus=4, object_store=128 << 20, head=head)

    def lose(self) -> None:
        """The other node, with whatever runs on it."""
        self.other.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def replace(self) -> None:
        self.other = self._node(self.head.address)

    def stop(self) -> None:
        for node in (self.other, self.head):
            node.stop()


@pytest.fixture(scope="module")
def cluster():
    """On this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # Ray refuses to count GPUs where they are hidden
        found = Cluster()
        yield found
        found.stop()


@pytest.fixture(scope="module")
def go(launch, cluster):
    """``go(out)`` -> a started run of the recipe."""

    def started(out):
        command = ["-m", "isoexec.cli", "train", "nodes", *SMALL, f"isoexec.ray_address={cluster.head.address}", f"isoexec.out={out}"]
        return launch(out, command)

    return started


@pytest.fixture(scope="module")
def whole(go, tmp_path_factory):
    """Folder of a run from start to end."""
    run = go(tmp_path_factory.mktemp("whole"))
    assert run.end() == 0, run.text()
    return run.out


def test_a_run_over_two_nodes_has_no_mismatch(whole):
    lines = read_steps(whole / "steps.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollout_train_logprobs_abs_diff_max"] == 0.0 and line["bit_equal"] == 1.0
        assert line["first_minibatch_ratio_min"] == line["first_minibatch_ratio_max"] == 1.0
    ranks = {file.name for file in (whole / "checkpoints/global_step_2/policy").glob("*.safetensors")}
    assert ranks == {"rank-0.safetensors", "rank-1.safetensors"}
    assert any("tensors equal in the policy and 2 engines" in log.read_text() for log in (whole / "logs").glob("*.log"))


def test_a_run_that_loses_a_node_stops_and_goes_on_when_there_is_another(go, cluster, whole, tmp_path_factory):
    out = tmp_path_factory.mktemp("lost")
    run = go(out)
    run.wait_for_phase("train_critic_and_policy")
    cluster.lose()
    assert run.end() == 4, run.text()
    assert "is whole; start again with trainer.resume_mode=latest" in run.said(), run.text()
    cluster.replace()
    again = go(out)
    assert again.end() == 0, again.text()
    assert numbers(out) == numbers(whole)
    assert digests(out / "checkpoints") == digests(whole / "checkpoints")
