"""A run that joins a Ray cluster of two nodes, both on this machine, with a policy rank and an engine on each."""

from __future__ import annotations

import os

import pytest

from isoexec.runtimes.skyrl.steps import read_steps

pytestmark = [
    pytest.mark.timeout(7200),
    pytest.mark.skipif(
        not os.environ.get("ISOEXEC_TEST_TRAINING"),
        reason="two engines and two policy ranks on two cores take some minutes; ISOEXEC_TEST_TRAINING=1 runs it",
    ),
]

_OBJECT_STORE = 128 << 20  # bytes


@pytest.fixture
def address():
    """Of a cluster of two nodes, each with one process to give."""
    from ray.cluster_utils import Cluster

    node = {"num_gpus": 1, "num_cpus": 4, "object_store_memory": _OBJECT_STORE}
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray refuses to count GPUs where they are hidden
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def test_a_run_over_two_nodes_has_no_mismatch(start, address):
    run = start(
        f"isoexec.ray_address={address}",
        "trainer.placement.policy_num_nodes=2",
        "trainer.placement.policy_num_gpus_per_node=1",
        "generator.inference_engine.num_engines=2",
    )
    assert run.end() == 0, run.text()
    lines = read_steps(run.out / "steps.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["rollout_train_logprobs_abs_diff_max"] == 0.0 and line["bit_equal"] == 1.0
        assert line["first_minibatch_ratio_min"] == line["first_minibatch_ratio_max"] == 1.0
    assert {file.name for file in (run.out / "checkpoints/global_step_3/policy").glob("*.safetensors")} == {
        "rank-0.safetensors",
        "rank-1.safetensors",
    }
    assert "2 engines" in run.text() or any("2 engines" in log.read_text() for log in (run.out / "logs").glob("*.log"))
