"""Qwen3 MoE, Qwen3.5 dense, Qwen3.5 MoE and GLM-4.7-Flash in Megatron: what every architecture owes, each equality with a planted ulp."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from same_scores import assert_same
from transformers import AutoConfig

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.ops._core import registry
from isoexec.ops._core.bits import as_bits, bit_equal, nudge
from isoexec.runtimes.megatron import hf_files, mapping
from tests.ops.op_checks import same_bits

ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Glm4MoeLiteForCausalLM")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request):
    return request.param


@pytest.fixture(scope="module")
def folder(architecture, checkpoint_of):
    return checkpoint_of(architecture)[0]


@pytest.fixture(scope="module")
def contracted(architecture, checkpoint_of):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTRACT_VARIABLE, checkpoint_of(architecture)[1])
        yield


@pytest.fixture(scope="module")
def trainer(contracted, folder):
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    trainer = PolicyTrainer(folder)
    yield trainer
    trainer.close()


@pytest.mark.parametrize(
    "arguments",
    [{"packing": 4096}, {"packing": [[5, 0, 3], [1], [4, 2]]}, {"packing": 100, "grad": True}, {"packing": 100, "recompute": True}],
    ids=["one pack", "permuted", "with gradients", "recomputed"],
)
def test_bits_are_those_of_a_sequence_alone(trainer, sequences, alone, arguments):
    before = registry.served()
    assert_same(trainer.logprobs(sequences, temperature=0.7, with_rows=True, **arguments), alone)
    if "recompute" in arguments:
        assert any(case == "trainer_recompute" and n > before.get((op, case, by), 0) for (op, case, by), n in registry.served().items())


def test_one_ulp_in_one_weight_shows(trainer, sequences, alone):
    weight = trainer.gpt.decoder.layers[0].input_layernorm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(nudge(kept))
    found = trainer.logprobs(sequences, temperature=0.7, with_rows=True)
    with torch.no_grad():
        weight.copy_(kept)
    assert not any(a.row_digests == b.row_digests for a, b in zip(found, alone))
    assert_same(trainer.logprobs(sequences, temperature=0.7, with_rows=True), alone)


def test_close_to_transformers_in_fp32(trainer, sequences, folder, alone):
    # Where vLLM was imported before, it has registered configuration classes of its own, which transformers cannot build a model from.
    config = getattr(transformers, type(trainer.hf_config).__name__).from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    differences = []
    for (prompt, generated), score in zip(sequences, alone, strict=True):
        with torch.no_grad():
            rows = torch.log_softmax(reference(torch.tensor([[*prompt, *generated]])).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        differences.append((score.logprobs - rows.gather(1, torch.tensor(generated)[:, None])[:, 0]).abs())
    differences = torch.cat(differences)
    # Not the maximum: bf16 noise may decide a near-tie of a router otherwise than fp32 does.
    assert differences.mean() < 0.1 and differences.quantile(0.95) < 0.3, (differences.mean(), differences.sort().values[-4:])


def test_export_gives_back_the_checkpoint(trainer, folder, tmp_path):
    trainer.export_hf(tmp_path)
    stored, exported = load_file(Path(folder, "model.safetensors")), load_file(tmp_path / "model.safetensors")
    assert stored.keys() == exported.keys()
    for name, tensor in stored.items():
        same_bits(exported[name], tensor, name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layouts_are_inverse_to_each_other(folder, ranks):
    files = hf_files.HFFiles(folder)
    whole_rows = set()
    for entry in mapping.entries(AutoConfig.from_pretrained(folder)):
        tensors = [files.tensor(name) for name in entry.hf]
        whole = entry.join(*tensors)
        parts = [entry.shard(whole, rank, ranks) for rank in range(ranks)]
        back = parts[0] if entry.unshard is None else entry.unshard(parts)
        for found, expected in zip(entry.split(back), tensors, strict=True):
            same_bits(found.contiguous(), expected, entry.name)
        # One ulp in the last element of one rank's shard comes back as one ulp in one tensor, on whichever rank it lay.
        parts[-1] = nudge(parts[-1], -1)
        moved = entry.split(parts[0] if entry.unshard is None else entry.unshard(parts))
        wrong = [int((as_bits(a) != as_bits(b)).sum()) for a, b in zip(moved, tensors, strict=True)]
        assert sorted(wrong) == [0] * (len(wrong) - 1) + [entry.unshard is not None or ranks == 1], entry.name
        if ranks == 2 and entry.unshard is not None and not torch.equal(torch.cat(parts), whole):
            whole_rows.add(entry.name.split(".", 3)[-1])
    assert ranks == 1 or whole_rows, "some shard takes rows from several places"


def test_the_loss_falls_in_the_same_bits_every_time(contracted, folder, sequences, tmp_path):
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    runs = []
    for recompute in (False, False, True):
        trainer = PolicyTrainer(folder, recompute=recompute)
        results = [trainer.train_step(sequences, None, 1.0, packing=100) for _ in range(2)]
        runs.append((results, trainer.gradients()))
        trainer.close()
    results, gradients = runs[0]
    assert results[0]["loss"] > results[1]["loss"] > 0 and all(math.isfinite(r["grad_norm"]) for r in results)
    for other_results, other in runs[1:]:
        assert other_results == results
        for name, gradient in gradients.items():
            same_bits(other[name], gradient, name)
    idle = {name for name, gradient in gradients.items() if not gradient.any()}
    assert all(".experts." in name for name in idle), idle  # an expert may have had no token


def test_a_planted_ulp_moves_a_gradient(contracted, folder, sequences):
    """Negative control of the equality above."""
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    found = []
    for plant in (False, True):
        trainer = PolicyTrainer(folder)
        weight = trainer.gpt.decoder.layers[0].input_layernorm.weight
        if plant:
            with torch.no_grad():
                weight.copy_(nudge(weight))
        trainer.train_step(sequences[:2], None, 1.0)
        found.append(trainer.gradients())
        trainer.close()
    assert not bit_equal(found[0]["model.norm.weight"], found[1]["model.norm.weight"])


def test_the_native_arm_is_upstreams_and_close(architecture, folder, sequences, alone):
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(CONTRACT_VARIABLE)
        native = PolicyTrainer(folder)
        before = registry.served()
        found = native.logprobs(sequences, temperature=0.7, packing=1)
        loss = [native.train_step(sequences[:2], None, 1.0)["loss"] for _ in range(2)]
        ours = [type(m) for m in native.gpt.modules() if type(m).__module__.startswith("isoexec")]
        native.close()
    assert registry.served() == before and not ours
    a, b = (torch.cat([s.logprobs for s in scores]) for scores in (found, alone))
    assert not torch.equal(a, b) and (a - b).abs().mean() < 0.12
    assert loss[1] < loss[0]


def test_distributed_checkpoints_are_upstreams(trainer, folder):
    """Same keys, shapes and shards; the parameters that stay fp32 differ in dtype alone."""
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    def described(trainer):
        return {
            name: (t.key, t.dtype, t.local_shape, t.global_shape, t.global_offset, t.axis_fragmentations)
            for name, t in trainer.gpt.sharded_state_dict().items()
            if hasattr(t, "axis_fragmentations")  # a tensor, not an object or a factory
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(CONTRACT_VARIABLE)
        native = PolicyTrainer(folder)
        theirs = described(native)
        native.close()
    ours = described(trainer)
    fp32 = {name for name in ours if name.endswith(("A_log", "dt_bias"))}
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name in ours:
        assert ours[name][0] == theirs[name][0] and ours[name][2:] == theirs[name][2:]
        assert ours[name][1] == (torch.float32 if name in fp32 else theirs[name][1])
