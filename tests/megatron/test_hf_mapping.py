"""HF checkpoints to Megatron parameters and back: bit for bit, strict, named errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from isoexec.contract import ContractError
from isoexec.runtimes.megatron import checkpoint, hf_files, mapping
from tests.ops.op_checks import same_bits


@pytest.mark.parametrize("which", ["model_folder", "tied_folder"])
def test_export_gives_back_the_checkpoint(new_trainer, which, request, tmp_path):
    folder = request.getfixturevalue(which)
    new_trainer(folder).export_hf(tmp_path / "out")
    stored, exported = load_file(Path(folder, "model.safetensors")), load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == exported.keys()
    for name, tensor in stored.items():
        same_bits(exported[name], tensor, name)


def test_a_tied_model_scores_trains_and_stays_tied(new_trainer, tied_folder, sequences, tmp_path):
    trainer = new_trainer(tied_folder)
    assert trainer.gpt.output_layer.weight is None
    plain = trainer.logprobs(sequences, temperature=1.0, with_rows=True)
    recomputed = trainer.logprobs(sequences, temperature=1.0, with_rows=True, recompute=True, packing=64)
    assert [s.row_digests for s in plain] == [s.row_digests for s in recomputed]
    losses = [trainer.train_step(sequences, None, 1.0)["loss"] for _ in range(2)]
    assert losses[1] < losses[0]
    trainer.export_hf(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_layouts_are_inverse_to_each_other(tied, ranks):
    """Whole and sharded, every element of every parameter comes back to its place."""
    sizes = mapping.Sizes(heads=8, groups=4, head_size=2, layers=1, tied=tied)
    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8, "gate_proj": 12, "up_proj": 12}
    for entry in mapping.entries_for("Qwen3ForCausalLM", sizes):
        shapes = [(8,) if "norm" in name else (rows.get(name.split(".")[-2], 16), 4) for name in entry.hf]
        tensors = [torch.randn(shape).bfloat16() for shape in shapes]
        whole = entry.join(*tensors)
        assert sum(t.numel() for t in tensors) == whole.numel()
        parts = [entry.shard(whole, rank, ranks) for rank in range(ranks)]
        back = parts[0] if entry.unshard is None else entry.unshard(parts)
        for found, expected in zip(entry.split(back), tensors, strict=True):
            same_bits(found.contiguous(), expected, entry.name)


def test_grouped_rows_split_as_the_layer_splits_the_product():
    from isoexec.runtimes.megatron.layers import split_grouped_qkv

    heads, groups, size = 6, 2, 4
    entry = mapping._qkv("qkv", "a", mapping.Sizes(heads, groups, size, 1, False))
    q, k, v = (torch.randn(n * size, 3) for n in (heads, groups, groups))
    product = entry.join(q, k, v).t().contiguous()  # one-hot inputs: the product's columns are the weight's rows
    found = split_grouped_qkv(product, heads, groups, size)
    for part, expected in zip(found, (q, k, v), strict=True):
        same_bits(part.flatten(1), expected.t(), "columns")


def _without(tensors, folder):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _with_one_more(tensors, folder):
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)


def _in_fp32(tensors, folder):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()


def _shorter(tensors, folder):
    tensors["model.layers.0.self_attn.o_proj.weight"] = tensors["model.layers.0.self_attn.o_proj.weight"][:64].clone()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, "missing from the checkpoint: model.layers.1.mlp.up_proj.weight"),
        (_with_one_more, "belong to no parameter: model.layers.9.mlp.up_proj.weight"),
        (_in_fp32, r"decoder.final_layernorm.weight is torch.bfloat16 \(128,\), model.norm.weight give torch.float32"),
        (_shorter, r"linear_proj.weight is torch.bfloat16 \(128, 128\).* give torch.bfloat16 \(64, 128\)"),
    ],
)
def test_a_spoilt_checkpoint_is_refused_by_name(new_trainer, model_folder, tmp_path, spoil, message):
    folder = tmp_path / "spoilt"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors, folder)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ContractError, match=message):
        new_trainer(folder)


def test_sharded_files_are_read(new_trainer, model_folder, tmp_path):
    import json

    folder = tmp_path / "sharded"
    shutil.copytree(model_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, folder / file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    trainer = new_trainer(folder)
    found = checkpoint.hf_tensors(trainer.gpt, trainer.hf_config)
    for name, tensor in tensors.items():
        same_bits(found[name], tensor, name)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ContractError, match="lacks b.safetensors, which model.safetensors.index.json names"):
        hf_files.HFFiles(folder)
    for text in ("{", "{}", "[]"):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ContractError, match="is no index of weights"):
            hf_files.HFFiles(folder)


def test_a_failed_export_leaves_the_old_file(tmp_path):
    hf_files.save_hf({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(Exception):  # noqa: B017  (safetensors has its own error types)
        hf_files.save_hf({"a": "not a tensor"}, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_file(tmp_path / "model.safetensors")["a"].equal(torch.ones(2))


def test_another_architecture_is_refused(model_folder):
    config = AutoConfig.from_pretrained(model_folder)
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(ContractError, match="expected one of Qwen3ForCausalLM, .* found architecture LlamaForCausalLM"):
        mapping.entries(config)


def test_a_trainer_of_one_process_has_one_group_and_leaves_no_threads(new_trainer):
    """A gloo group has threads that wake a hundred times a second; Megatron makes some sixty groups, and a process may open many models."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    new_trainer().close()  # what the first one starts for the process stays
    before = threads()
    trainer = new_trainer()
    groups = {id(group) for group in parallel_state._global_process_group_list[1:]}
    opened = threads()
    trainer.close()
    assert len(groups) == 1
    assert before < opened < before + 10 and threads() < before + 4
