"""GLM-4.7-Flash in Megatron: the experts' bias is part of the policy, prediction layers are carried, other settings are refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from isoexec.contract import ContractError
from isoexec.ops import moe
from isoexec.ops._core.bits import bit_equal, nudge
from isoexec.runtimes.megatron import checkpoint, mapping
from tests.ops.op_checks import same_bits

ARCHITECTURE, BIAS = "Glm4MoeLiteForCausalLM", "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture
def copied(checkpoint_of, tmp_path):
    """``copied(change_tensors, **config)`` -> folder of a changed copy of the checkpoint."""

    def copy(change=lambda tensors: None, **config):
        folder = tmp_path / "copied"
        shutil.copytree(checkpoint_of(ARCHITECTURE)[0], folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
        return folder

    return copy


def rows(trainer, sequences, **arguments):
    return [s.row_digests for s in trainer.logprobs(sequences, temperature=1.0, with_rows=True, **arguments)]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_moves_the_bias_by_the_tokens_that_it_saw_and_scoring_does_not(new_trainer, sequences, tmp_path, recompute):
    trainer = new_trainer(recompute=recompute)
    router, counted = trainer.gpt.decoder.layers[1].mlp.router, []
    count = type(router).count

    def spy(experts):
        if torch.is_grad_enabled():
            counted.append(moe.tokens_per_expert(experts, num_experts=8))
        count(router, experts)

    router.count = spy
    before = router.expert_bias.clone()
    first = rows(trainer, sequences, grad=True, packing=100)
    assert rows(trainer, sequences, recompute=True) == first == rows(trainer, sequences)
    same_bits(router.expert_bias, before, "bias after scoring")
    counted.clear()
    trainer.train_step(sequences, None, 1.0, packing=100)
    assert len(counted) > 1
    expected = moe.update_expert_bias(before, sum(counted), rate=1e-3)
    same_bits(router.expert_bias, expected, "bias after a step")
    assert not bit_equal(expected, before)
    trainer.export_hf(tmp_path)
    same_bits(load_file(tmp_path / "model.safetensors")[BIAS], expected, "exported bias")


def test_what_was_exported_scores_the_same_and_without_its_bias_does_not(new_trainer, copied, sequences, tmp_path):
    trainer = new_trainer()
    trainer.train_step(sequences, None, 1.0)
    with torch.no_grad():
        trainer.gpt.decoder.layers[1].mlp.router.expert_bias.add_(torch.linspace(-0.3, 0.3, 8))
    expected = rows(trainer, sequences)
    trainer.export_hf(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    trainer.close()
    folder, found = copied(lambda tensors: tensors.update(exported)), []
    for bias in (exported[BIAS], exported[BIAS].flip(0).contiguous()):
        save_file(exported | {BIAS: bias}, folder / "model.safetensors")
        again = new_trainer(folder)
        found.append(rows(again, sequences))
        again.close()
    assert found[0] == expected != found[1]


def test_the_bias_is_among_the_tensors_that_a_run_saves_and_digests(new_trainer):
    trainer = new_trainer()
    tensors = checkpoint.policy_tensors(trainer.ddp)
    [name] = [name for name in tensors if name.endswith("expert_bias")]
    assert tensors[name].dtype == torch.float32 and tensors[name] is trainer.gpt.decoder.layers[1].mlp.router.expert_bias
    assert tensors.keys() - {name} == {name for name, _ in trainer.ddp.named_parameters()}
    before = trainer.weight_manifest()
    assert before.tensors[BIAS].dtype == "float32"
    with torch.no_grad():
        tensors[name][3] = nudge(tensors[name][3:4])[0]
    after = trainer.weight_manifest()
    assert [n for n in before.tensors if after.tensors[n] != before.tensors[n]] == [BIAS]


def test_prediction_layers_are_carried(new_trainer, copied, tmp_path):
    extra = {"model.layers.2.eh_proj.weight": torch.randn(4, 4).bfloat16(), "model.layers.2.mlp.gate.weight": torch.ones(2)}
    folder = copied(lambda tensors: tensors.update(extra), num_nextn_predict_layers=1)
    new_trainer(folder).export_hf(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == load_file(folder / "model.safetensors").keys()
    for name, tensor in extra.items():
        same_bits(exported[name], tensor, name)


def test_a_layer_beyond_the_models_is_not_carried_unannounced(new_trainer, copied):
    folder = copied(lambda tensors: tensors.update({"model.layers.2.mlp.gate.weight": torch.ones(2)}))
    with pytest.raises(ContractError, match="belong to no parameter: model.layers.2.mlp.gate.weight"):
        new_trainer(folder)


def test_a_bias_that_is_not_fp32_is_widened(new_trainer, copied):
    def narrow(tensors):
        tensors[BIAS] = tensors[BIAS].bfloat16()

    assert new_trainer(copied(narrow)).gpt.decoder.layers[1].mlp.router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"first_k_dense_replace": 2}, "mlp_layer_types: expected 2 dense layers .* found \\['dense', 'sparse'\\]"),
        ({"norm_topk_prob": False}, "norm_topk_prob: expected true, found false"),
        ({"attention_bias": True}, "latent attention: expected .* no attention_bias"),
        ({"rope_interleave": False}, "latent attention: expected .* rope_interleave"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope_type: expected 'default', found 'yarn'"),
    ],
)
def test_another_model_is_refused_by_name(new_trainer, copied, config, message):
    with pytest.raises(ContractError, match=message):
        new_trainer(copied(**config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_type": "yarn"}, "rope_type: expected 'rope', found 'yarn'"),
        ({"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}, "moe_router_score_function: expected 'sigmoid'"),
        ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate: expected False, found True"),
    ],
)
def test_settings_outside_the_contract_are_refused(new_trainer, monkeypatch, overrides, message):
    from isoexec.runtimes.megatron import model as models

    allowed = models.transformer_config
    monkeypatch.setattr(models, "transformer_config", lambda *a, **k: allowed(*a, **k, **overrides))
    with pytest.raises(ContractError, match=message):
        new_trainer()


def test_names_cover_a_checkpoint_of_the_published_form():
    """Layer 0 dense, one shared expert: names as HF writes them."""
    sizes = mapping.Sizes(heads=4, groups=4, head_size=8, layers=2, tied=False, sparse=(False, True), experts=2, shared=True)
    names = {name for entry in mapping.entries_for(ARCHITECTURE, sizes) for name in entry.hf}
    attention = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    assert {f"model.layers.1.self_attn.{part}.weight" for part in attention} <= names
    assert {BIAS, "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.shared_experts.down_proj.weight"} <= names
    assert not any(name.startswith("model.layers.0.mlp.gate.") for name in names)
