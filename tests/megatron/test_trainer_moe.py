"""Routed experts in Megatron: ties, auxiliary loss, expert parallelism, forms of a checkpoint, refused settings."""

from __future__ import annotations

import os

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from same_scores import assert_layout, score_and_step

from isoexec.contract import CONTRACT_VARIABLE, ContractError
from isoexec.ops import moe
from isoexec.ops._core.bits import as_bits, nudge
from isoexec.runtimes.megatron import hf_files
from isoexec.runtimes.megatron import trainer as runtime
from tests.ops.op_checks import same_bits

ARCHITECTURE, HYBRID = "Qwen3MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"


def routes(trainer, layer=-1):
    """List that gets (logits, experts) of every call of a layer's router."""
    router, seen = trainer.gpt.decoder.layers[layer].mlp.router, []
    hook = type(router).on_route

    def spy(logits, weights, experts):
        seen.append((logits.detach(), experts))
        return hook(router, logits, weights, experts)

    router.on_route = spy
    return seen


def test_ties_go_to_the_lowest_expert_with_gradients_too(new_trainer, sequences):
    trainer = new_trainer()
    for layer in trainer.gpt.decoder.layers:  # experts 2 j and 2 j + 1 have equal logits
        with torch.no_grad():
            layer.mlp.router.weight[1::2] = layer.mlp.router.weight[::2]
    seen = routes(trainer)
    passes = [trainer.logprobs(sequences, temperature=1.0, with_rows=True, **a) for a in ({}, {"grad": True}, {"recompute": True})]
    assert [s.row_digests for s in passes[0]] == [s.row_digests for s in passes[1]] == [s.row_digests for s in passes[2]]
    assert len(seen) == 4  # the recomputed pass routes twice
    for logits, experts in seen:
        assert (experts[:, ::2] % 2 == 0).all() and (experts[:, 1::2] == experts[:, ::2] + 1).all()
    seen.clear()
    with torch.no_grad():  # negative control: no tie, no rule
        weight = trainer.gpt.decoder.layers[-1].mlp.router.weight
        weight[1::2] = nudge(weight[1::2].clone(), index=0, ulps=64)
    trainer.logprobs(sequences, temperature=1.0)
    assert (seen[0][1][:, ::2] % 2 == 1).any()


def test_an_auxiliary_loss_trains_the_router_and_moves_no_logprob(new_trainer, sequences):
    """With advantages of zero the policy's own gradient is zero, so that what is left is the auxiliary loss."""
    zero, found = [0.0] * len(sequences), []
    for coefficient in (0.0, 2**-10, 2**-9):
        trainer = new_trainer(lr=0.0, aux_loss=coefficient)
        bits = [as_bits(s.logprobs).tolist() for s in trainer.logprobs(sequences, temperature=1.0, grad=True)]
        trainer.train_step(sequences, zero, 1.0)
        router = {n: g for n, g in trainer.gradients().items() if n.endswith("mlp.gate.weight")}
        found.append((bits, router))
        trainer.close()
    assert found[0][0] == found[1][0] == found[2][0]
    assert len(found[0][1]) == 2 and not any(g.any() for g in found[0][1].values())
    for name, gradient in found[1][1].items():
        assert gradient.any()
        same_bits(found[2][1][name], gradient * 2, name)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_lowers_the_auxiliary_loss(new_trainer, sequences, recompute):
    """To first order, at the counts that the gradient took as constant: a sign, or a factor left out, would show."""
    trainer = new_trainer(lr=1e-3, aux_loss=1.0, recompute=recompute)
    seen = [routes(trainer, layer) for layer in (0, 1)]
    for _ in range(2):
        trainer.train_step(sequences, [0.0] * len(sequences), 1.0)

    def loss(step):
        total = 0.0
        for calls in seen:
            counts = moe.tokens_per_expert(calls[0][1], num_experts=8)
            logits = calls[step][0]
            total += moe.load_balancing_loss(logits, counts, total_tokens=len(logits), top_k=4, coefficient=1.0)
        return total

    assert [len(calls) for calls in seen] == [4 if recompute else 2] * 2
    assert loss(-1) < loss(0) - 1e-3


def score(contract: str, model: str, sequences: list, layout: dict, plant: bool = False):
    os.environ[CONTRACT_VARIABLE] = contract
    trainer = runtime.PolicyTrainer(model, **layout)
    if plant and torch.distributed.get_rank() == 1:
        weight = trainer.gpt.decoder.layers[0].mlp.experts.local_experts[0].linear_fc2.weight
        with torch.no_grad():
            weight.copy_(nudge(weight, index=int(weight.abs().argmax())))
    scores = trainer.logprobs(sequences, temperature=0.7, packing=100, with_rows=True)
    trainer.close()
    return [(as_bits(s.logprobs).tolist(), s.row_digests) for s in scores]


@pytest.fixture(scope="module", params=[ARCHITECTURE, HYBRID, "Glm4MoeLiteForCausalLM"])
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def one_process(architecture, checkpoint_of, sequences, tmp_path_factory):
    model, contract = checkpoint_of(architecture)
    return on_ranks(1, score_and_step, contract, model, sequences, {}, str(tmp_path_factory.mktemp("one")))[0]


LAYOUTS = {
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp2-sp-ep2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_have_the_bits_of_one_process(checkpoint_of, sequences, architecture, one_process, layout, tmp_path):
    model, contract = checkpoint_of(architecture)
    ranks = on_ranks(2, score_and_step, contract, model, sequences, layout, str(tmp_path))
    assert_layout(ranks, one_process, model, tmp_path, norm_tolerance=5e-3)


def test_experts_over_data_parallel_ranks(checkpoint_of, sequences):
    """Each rank brings sequences of its own, in another order."""
    model, contract = checkpoint_of(ARCHITECTURE)
    one = on_ranks(1, score, contract, model, sequences, {})[0]
    assert on_ranks(2, score, contract, model, sequences, {"expert_parallel": 2}) == [one, one]
    for found in on_ranks(2, score, contract, model, sequences, {"expert_parallel": 2}, True):
        assert found != one  # negative control: one ulp in one rank's expert, both ranks' tokens


def test_every_form_of_a_checkpoint_are_read_and_written(checkpoint_of, tmp_path):
    """The same weights with a vision tower and stacked experts, and as a text model with a matrix per expert."""
    nested = hf_files.HFFiles(checkpoint_of(HYBRID)[0])
    flat = {name: nested.tensor(name).contiguous() for name in nested.names()}
    assert {n for n in flat if ".experts.7." in n and ".layers.1." in n} == {
        f"model.layers.1.mlp.experts.7.{part}_proj.weight" for part in ("gate", "up", "down")
    }
    save_file(flat, tmp_path / "model.safetensors")
    text = hf_files.HFFiles(tmp_path)
    assert text.names() == nested.names()
    for name, tensor in text.in_stored_form(flat).items():
        same_bits(tensor, flat[name], name)
    stored = load_file(os.path.join(checkpoint_of(HYBRID)[0], "model.safetensors"))
    assert any(name.startswith("model.visual.") for name in stored)
    experts = {name for name in stored if ".experts." in name}
    stacked = {name: tensor for name, tensor in stored.items() if name not in experts}
    for i in (0, 1):
        prefix = f"model.language_model.layers.{i}.mlp.experts"
        gate, up, down = (torch.stack([stored[f"{prefix}.{e}.{x}_proj.weight"] for e in range(8)]) for x in ("gate", "up", "down"))
        stacked |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    (tmp_path / "stacked").mkdir()
    save_file(stacked, tmp_path / "stacked" / "model.safetensors")
    for form, tensors in ((nested, stored), (hf_files.HFFiles(tmp_path / "stacked"), stacked)):
        assert form.names() == flat.keys()
        for name, tensor in flat.items():
            same_bits(form.tensor(name).contiguous(), tensor, name)
        back = form.in_stored_form(flat)
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            same_bits(back[name], tensor, name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type: expected 'none' or 'aux_loss', found 'sinkhorn'"),
        ({"moe_z_loss_coeff": 1e-3}, "moe_z_loss_coeff: expected None"),
        ({"moe_shared_expert_intermediate_size": 64}, "moe_shared_expert_intermediate_size: expected None"),
        ({"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}, "moe_router_score_function: expected 'softmax'"),
        ({"num_moe_experts": 12}, "expected a divisor of numerics.combine_groups 8, and that one of 12 experts, found 1"),
    ],
)
def test_settings_outside_the_contract_are_refused(new_trainer, monkeypatch, overrides, message):
    from isoexec.runtimes.megatron import model as models

    allowed = models.transformer_config
    monkeypatch.setattr(models, "transformer_config", lambda *a, **k: allowed(*a, **k, **overrides))
    with pytest.raises(ContractError, match=message):
        new_trainer()


def tensor_parallel_alone(contract: str, model: str):
    os.environ[CONTRACT_VARIABLE] = contract
    try:
        runtime.PolicyTrainer(model, tensor_parallel=2)
    except ContractError as error:
        return str(error)


def test_tensor_parallel_experts_need_sequence_parallelism(checkpoint_of):
    model, contract = checkpoint_of(ARCHITECTURE)
    for message in on_ranks(2, tensor_parallel_alone, contract, model):
        assert message.startswith("sequence_parallel: expected True with experts under tensor parallelism")
