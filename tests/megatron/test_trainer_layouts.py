"""Tensor, sequence and pipeline parallelism on gloo processes: every layout gives the logprob bits of one process.

Gradients are promised to a tolerance only: a sum over ranks of bf16 gradients rounds otherwise than one process does.
"""

from __future__ import annotations

import os

import pytest
import torch
from ranks import on_ranks
from same_scores import PACK, assert_gradients_close, assert_layout, assert_scores, score_and_step

from isoexec.contract import CONTRACT_VARIABLE, Claims, ContractError, ExecutionContract
from isoexec.ops._core.bits import as_bits
from isoexec.runtimes.megatron import trainer as runtime


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    path = tmp_path_factory.mktemp("contract") / "contract.json"
    claims = Claims(trainer_tp=2, trainer_pp=2, trainer_sp=True)
    path.write_text(ExecutionContract("Qwen3ForCausalLM", "cpu", claims=claims).to_json())
    return str(path)


@pytest.fixture(scope="module")
def one_process(contract, model_folder, sequences, tmp_path_factory):
    return on_ranks(1, score_and_step, contract, model_folder, sequences, {}, str(tmp_path_factory.mktemp("one")))[0]


LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp2-sp-recompute": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": True},
    "pp2": {"pipeline_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_have_the_bits_of_one_process(contract, model_folder, sequences, one_process, layout, tmp_path):
    ranks = on_ranks(2, score_and_step, contract, model_folder, sequences, layout, str(tmp_path))
    assert [bool(found["score"]) for found in ranks] == ([False, True] if "pipeline_parallel" in layout else [True, True])
    assert_layout(ranks, one_process, model_folder, tmp_path)


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_a_tied_model_in_parallel(contract, tied_folder, sequences, tmp_path, layout):
    one = on_ranks(1, score_and_step, contract, tied_folder, sequences, {}, str(tmp_path / "one"))[0]
    found = on_ranks(2, score_and_step, contract, tied_folder, sequences, LAYOUTS[layout], str(tmp_path / "two"))[-1]
    assert_scores(found, one)
    assert_gradients_close(found["gradients"], one["gradients"])
    assert found["manifest"] == one["manifest"] and "lm_head.weight" not in one["manifest"]


def drift(contract: str, model: str, layout: dict) -> str:
    """What the manifest says when a tensor that every rank holds whole has moved on one of them."""
    from isoexec.ops._core.bits import nudge

    os.environ[CONTRACT_VARIABLE] = contract
    trainer = runtime.PolicyTrainer(model, **layout)
    if torch.distributed.get_rank() == 1:
        weight = trainer.gpt.decoder.layers[1].input_layernorm.weight
        with torch.no_grad():
            weight.copy_(nudge(weight, index=5))
    try:
        return str(trainer.weight_manifest())
    except ContractError as error:
        return str(error)
    finally:
        trainer.close()


def test_replicas_that_have_drifted_apart_are_refused(contract, model_folder):
    for message in on_ranks(2, drift, contract, model_folder, LAYOUTS["tp2"]):
        assert message.startswith("weights.model.layers.1.input_layernorm.weight: two copies in the trainer differ")


def test_a_layout_shows_a_planted_ulp(contract, model_folder, sequences, one_process, tmp_path):
    """Negative control: one ulp in one rank's shard reaches both ranks' logprobs."""
    ranks = on_ranks(2, plant_and_score, contract, model_folder, sequences, LAYOUTS["tp2"])
    for found in ranks:
        assert found != one_process["score"]


def plant_and_score(contract: str, model: str, sequences: list, layout: dict):
    from isoexec.ops._core.bits import nudge

    os.environ[CONTRACT_VARIABLE] = contract
    trainer = runtime.PolicyTrainer(model, **layout)
    if torch.distributed.get_rank() == 1:
        weight = trainer.gpt.decoder.layers[0].mlp.linear_fc2.weight
        with torch.no_grad():
            weight.copy_(nudge(weight, index=int(weight.abs().argmax())))
    scores = trainer.logprobs(sequences, temperature=0.7, packing=PACK, with_rows=True)
    trainer.close()
    return [(as_bits(s.logprobs).tolist(), s.row_digests) for s in scores]
