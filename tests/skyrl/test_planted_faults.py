"""One live run in which the cache's barriers fall, each alone and both, and at last a weight stays behind: what is seen, and by which name.

It samples at temperature 0.7, and the same prompts at every step, so that a stale prefix would be hit. Its engine is apart from the policy:
one that sleeps between steps forgets its cache by that alone.
"""

from __future__ import annotations

import json

import pytest

from isoexec.runtimes.skyrl.steps import read_steps
from tests.skyrl.long import takes_minutes
from tests.skyrl.planted import planted

pytestmark = takes_minutes("a run of five steps: a minute of two idle cores", 3600)

STEPS = 5
SETTINGS = ("isoexec.on_mismatch=warn", "trainer.placement.colocate_all=false", "trainer.ckpt_interval=-1")
WEIGHT = "model.layers.1.mlp.down_proj.weight"
#: Step n samples after sync n, which flushes the caches, under weight version n, which is part of their keys.
PLANTS = {
    "isoexec.runtimes.skyrl.client": """
_flush, _syncs = InferenceClient.reset_prefix_cache, []

async def _reset(self, **arguments):
    _syncs.append(None)
    return {} if len(_syncs) in (2, 4) else await _flush(self, **arguments)

InferenceClient.reset_prefix_cache = _reset
""",
    "isoexec.runtimes.skyrl.generator": """
_salt = SeededGenerator._compute_cache_salt
SeededGenerator._compute_cache_salt = lambda self: "the same" if self.inference_engine_client.weight_version < 4 else _salt(self)
""",
    "isoexec.runtimes.vllm.engine": f"""
_replace, _syncs = replace_weights, []

def replace_weights(runner, tensors):
    _syncs.append(None)
    weight = runner.get_model().model.layers[1].mlp.down_proj.weight
    before = weight.detach().clone()
    _replace(runner, tensors)
    if len(_syncs) == {STEPS + 1}:
        weight.data.copy_(before)
""",
}


@pytest.fixture(scope="module")
def run(start, tmp_path_factory):
    """The run, at its end."""
    plants = planted(tmp_path_factory.mktemp("plants"), PLANTS)
    run = start(f"trainer.max_training_steps={STEPS}", *SETTINGS, **plants)
    assert run.end() != 0, run.text()
    assert not run.left(), run.left(0)
    return run


def test_each_barrier_of_the_prefix_cache_is_enough_and_without_both_the_stale_hit_is_seen(run):
    lines = {line["step"]: line for line in read_steps(run.out / "steps.jsonl")}
    differing = [step for step, line in lines.items() if line["bit_equal"] < 1]
    assert list(lines) == [1, 2, 3, 4] and differing == [2], run.text()
    assert lines[2]["rollout_train_logprobs_abs_diff_max"] > 0 and lines[2]["first_minibatch_rollout_ratio_max"] > 1
    assert [folder.name for folder in run.out.glob("mismatch-*")] == ["mismatch-2"]


def test_a_weight_that_a_sync_left_behind_is_named(run):
    assert f"weights.{WEIGHT}: trainer has " in run.said() and "1 of " in run.said(), run.text()


def test_the_tokens_that_were_sampled_are_scored_and_not_those_of_their_text(run, model):
    from transformers import AutoTokenizer

    found = json.loads((run.out / "mismatch-2/mismatch.json").read_text())
    response = found["tokens"][found["prompt_tokens"] :]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.encode(tokenizer.decode(response)) != response
