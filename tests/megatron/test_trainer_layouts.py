"""Tensor, sequence and pipeline parallelism on gloo processes: every layout gives the logprob bits of one process.

Gradients are promised to a tolerance only: a sum over ranks of bf16 gradients rounds otherwise than one process does.
"""

from __future__ import annotations

import os

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file

from isoexec.contract import CONTRACT_VARIABLE, Claims, ContractError, ExecutionContract
from isoexec.ops._core.bits import as_bits, assert_bit_equal
from isoexec.runtimes.megatron import trainer as runtime

PACK = 100


def score_and_step(contract: str | None, model: str, sequences: list, layout: dict, export: str) -> dict:
    """On one rank: bits of the scores in the three cases, then one optimizer step."""
    os.environ[CONTRACT_VARIABLE] = contract or ""
    trainer = runtime.PolicyTrainer(model, **layout)

    def score(**arguments):
        scores = trainer.logprobs(sequences, temperature=0.7, packing=PACK, with_rows=True, **arguments)
        return [(as_bits(s.logprobs).tolist(), s.row_digests) for s in scores]

    trainer.export_hf(export)
    manifest = trainer.weight_manifest().data() if contract else None
    found = {"manifest": manifest, "score": score(), "forward": score(grad=True), "recompute": score(recompute=True)}
    found |= trainer.train_step(sequences, None, 0.7, packing=PACK)
    found["gradients"] = {name: gradient.numpy() for name, gradient in trainer.gradients().items()}
    trainer.close()
    return found


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    path = tmp_path_factory.mktemp("contract") / "contract.json"
    claims = Claims(trainer_tp=2, trainer_pp=2, trainer_sp=True)
    path.write_text(ExecutionContract("Qwen3ForCausalLM", "cpu", claims=claims).to_json())
    return str(path)


@pytest.fixture(scope="module")
def one_process(contract, model_folder, sequences, tmp_path_factory):
    return on_ranks(1, score_and_step, contract, model_folder, sequences, {}, str(tmp_path_factory.mktemp("one")))[0]


def assert_scores(found: dict, expected: dict):
    for case in ("score", "forward", "recompute"):
        assert found[case] == expected["score"], case


def assert_gradients_close(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        a, b = torch.from_numpy(found[name]), torch.from_numpy(gradient)
        assert (a - b).norm() < 0.03 * b.norm(), f"{name}: {(a - b).norm() / b.norm():.4f}"


LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp2-sp-recompute": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": True},
    "pp2": {"pipeline_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_have_the_bits_of_one_process(contract, model_folder, sequences, one_process, layout, tmp_path):
    ranks = on_ranks(2, score_and_step, contract, model_folder, sequences, layout, str(tmp_path))
    if "pipeline_parallel" in layout:
        assert ranks[0]["score"] == [], "a stage before the last has no logits"
        ranks = ranks[1:]
    for found in ranks:
        assert found["manifest"] == one_process["manifest"], "the same weights have one manifest, in any layout and on every rank"
        assert_scores(found, one_process)
        assert found["loss"] == pytest.approx(one_process["loss"], rel=1e-6)
        assert found["grad_norm"] == pytest.approx(one_process["grad_norm"], rel=2e-3)
        assert_gradients_close(found["gradients"], one_process["gradients"])
    stored = load_file(os.path.join(model_folder, "model.safetensors"))
    exported = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == exported.keys()
    for name, tensor in stored.items():
        assert_bit_equal(exported[name], tensor, name)


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
            weight.copy_(nudge(weight, index=int(weight.abs().argmax()), ulps=4))
    scores = trainer.logprobs(sequences, temperature=0.7, packing=PACK, with_rows=True)
    trainer.close()
    return [(as_bits(s.logprobs).tolist(), s.row_digests) for s in scores]
