"""Gated DeltaNet in Megatron: fp32 parameters, tensor parallelism by heads, text-only and nested checkpoints."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file, save_file
from same_scores import assert_layout, score_and_step

from isoexec.contract import CONTRACT_VARIABLE, ContractError, ExecutionContract
from isoexec.ops._core import registry
from isoexec.ops._core.bits import nudge
from isoexec.runtimes.megatron import layers
from tests.checkpoints import in_form_of
from tests.ops.op_checks import same_bits

ARCHITECTURE = "Qwen3_5ForCausalLM"


def test_decay_parameters_are_fp32_everywhere(new_trainer, checkpoint_of, sequences):
    trainer = new_trainer(lr=1e-5)
    parameters = dict(trainer.gpt.named_parameters())
    fp32 = {name for name, p in parameters.items() if p.dtype == torch.float32}
    assert fp32 == {f"decoder.layers.0.self_attention.{name}" for name in ("A_log", "dt_bias")}
    stored = load_file(os.path.join(checkpoint_of(ARCHITECTURE)[0], "model.safetensors"))["model.layers.0.linear_attn.A_log"]
    mixer = trainer.gpt.decoder.layers[0].self_attention
    assert not torch.equal(stored.bfloat16().float(), stored), "else a cast would not show"
    same_bits(mixer.A_log.detach(), stored, "A_log")
    assert mixer.A_log.tensor_model_parallel and mixer.A_log.partition_dim == 0
    trainer.train_step(sequences[:2], None, 1.0)
    moved = mixer.A_log.detach()
    assert moved.ne(stored).all() and torch.equal(moved.bfloat16(), stored.bfloat16()), "a step that bf16 would not keep"


def test_a_cast_of_the_model_leaves_them(new_trainer):
    trainer = new_trainer()
    mixer = trainer.gpt.decoder.layers[0].self_attention
    before = mixer.A_log.detach().clone()
    trainer.gpt.bfloat16()
    same_bits(mixer.A_log.detach(), before, "A_log")
    mixer.A_log.data = mixer.A_log.data.bfloat16()
    with pytest.raises(ContractError, match="A_log: expected torch.float32, found torch.bfloat16"):
        mixer()


def test_a_parameter_in_another_dtype_is_loaded_when_no_bit_is_lost(new_trainer, checkpoint_of, tmp_path):
    shutil.copytree(checkpoint_of(ARCHITECTURE)[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.linear_attn."
    tensors[f"{prefix}A_log"] = tensors[f"{prefix}A_log"].bfloat16()
    tensors[f"{prefix}norm.weight"] = tensors[f"{prefix}norm.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    mixer = new_trainer(tmp_path).gpt.decoder.layers[0].self_attention
    same_bits(mixer.A_log.detach(), tensors[f"{prefix}A_log"].float(), "A_log")
    same_bits(mixer.out_norm.weight.detach().float(), tensors[f"{prefix}norm.weight"], "norm")
    tensors[f"{prefix}norm.weight"][3] += 2**-20
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ContractError, match="linear_attn.norm.weight is torch.float32 .* the cast loses bits"):
        new_trainer(tmp_path)


LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True, "recompute": True},
    "pp2": {"pipeline_parallel": 2},  # Gated DeltaNet on the first stage, attention on the second
}


@pytest.fixture(scope="module")
def one_process(checkpoint_of, sequences, tmp_path_factory):
    model, contract = checkpoint_of(ARCHITECTURE)
    return on_ranks(1, score_and_step, contract, model, sequences, {}, str(tmp_path_factory.mktemp("one")))[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_have_the_bits_of_one_process(checkpoint_of, sequences, one_process, layout, tmp_path):
    model, contract = checkpoint_of(ARCHITECTURE)
    ranks = on_ranks(2, score_and_step, contract, model, sequences, layout, str(tmp_path))
    assert_layout(ranks, one_process, model, tmp_path)
    norm = "model.layers.0.linear_attn.norm.weight"
    assert (ranks[0]["gradients"][norm] == ranks[1]["gradients"][norm]).all(), "ranks would drift apart"


@pytest.mark.parametrize(
    ("one", "other"),
    [(ARCHITECTURE, "Qwen3_5ForConditionalGeneration"), ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM")],
    ids=["dense", "experts"],
)
def test_both_forms_of_a_checkpoint_are_one_model(new_trainer, checkpoint_of, sequences, tmp_path, monkeypatch, one, other):
    """A text model, and the same weights beside a vision tower: the same rows, and each goes back out in its own form."""
    folder, contract = checkpoint_of(one)
    monkeypatch.setenv(CONTRACT_VARIABLE, contract)
    expected = new_trainer(folder).logprobs(sequences[:3], temperature=1.0, with_rows=True)
    theirs, contract = checkpoint_of(other)
    shutil.copytree(theirs, tmp_path, dirs_exist_ok=True)
    tensors = in_form_of(theirs, folder)
    save_file(tensors, tmp_path / "model.safetensors")
    monkeypatch.setenv(CONTRACT_VARIABLE, contract)
    trainer = new_trainer(tmp_path)
    found = trainer.logprobs(sequences[:3], temperature=1.0, with_rows=True)
    assert [s.row_digests for s in found] == [s.row_digests for s in expected]
    trainer.export_hf(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == tensors.keys() == load_file(os.path.join(theirs, "model.safetensors")).keys()
    assert any("visual" in name for name in exported) == other.endswith("ConditionalGeneration")
    for name, tensor in tensors.items():
        same_bits(exported[name], tensor, name)
    norm = trainer.gpt.decoder.layers[0].input_layernorm.weight
    with torch.no_grad():  # negative control: one ulp of one weight
        norm.copy_(nudge(norm))
    assert [s.row_digests for s in trainer.logprobs(sequences[:3], temperature=1.0, with_rows=True)] != [s.row_digests for s in expected]


def test_gated_rows_split_as_the_layer_splits_the_product():
    from isoexec.runtimes.megatron import mapping

    heads, groups, size = 6, 2, 4
    entry = mapping._qkv("qkv", "a", mapping.Sizes(heads, groups, size, 1, False), gated=True)
    q_gate, k, v = (torch.randn(n * size, 3) for n in (2 * heads, groups, groups))
    product = entry.join(q_gate, k, v).t().contiguous()  # one-hot inputs: the product's columns are the weight's rows
    q, gate, k_found, v_found = layers.split_grouped_qkv(product, heads, groups, size)
    by_head = q_gate.view(heads, 2, size, 3)
    for found, rows in ((q, by_head[:, 0]), (gate, by_head[:, 1]), (k_found, k), (v_found, v)):
        same_bits(found.flatten(1), rows.reshape(-1, 3).t(), "columns")


def test_the_contract_chooses_the_form_of_the_core(new_trainer, checkpoint_of, sequences, tmp_path, monkeypatch):
    wy = new_trainer().logprobs(sequences, temperature=1.0, with_rows=True)
    contract = ExecutionContract.from_json(Path(checkpoint_of(ARCHITECTURE)[1]).read_text())
    path = tmp_path / "contract.json"
    path.write_text(dataclasses.replace(contract, numerics=dataclasses.replace(contract.numerics, gdn_form="cpr")).to_json())
    monkeypatch.setenv(CONTRACT_VARIABLE, str(path))
    trainer = new_trainer()
    before = registry.served()
    alone = trainer.logprobs(sequences, temperature=1.0, with_rows=True, packing=1)
    packed = trainer.logprobs(sequences, temperature=1.0, with_rows=True, recompute=True)
    assert [s.row_digests for s in alone] == [s.row_digests for s in packed] != [s.row_digests for s in wy]
    cores = {op for (op, case, by), n in registry.served().items() if op.startswith("gdn.cpr") and n > before.get((op, case, by), 0)}
    assert cores == {"gdn.cpr"}
    assert (torch.cat([s.logprobs for s in alone]) - torch.cat([s.logprobs for s in wy])).abs().mean() < 0.1
    losses = [trainer.train_step(sequences[:3], None, 1.0)["loss"] for _ in range(2)]
    assert losses[1] < losses[0]


def test_partial_rope_is_the_hybrids_alone(new_trainer, checkpoint_of, tmp_path, monkeypatch):
    from isoexec.runtimes.megatron.modules import RopeTable

    assert new_trainer().gpt.rotary_pos_emb.rotary_dim == 16  # a quarter of 64
    path = tmp_path / "contract.json"
    path.write_text(ExecutionContract("Qwen3ForCausalLM", "cpu").to_json())
    monkeypatch.setenv(CONTRACT_VARIABLE, str(path))
    with pytest.raises(ContractError, match="rope: expected the architecture's plain rotary embedding, found .*0.25"):
        RopeTable(64, 0.25, rotary_base=1e4)
