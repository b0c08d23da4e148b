"""Scoring under a contract: the same bits however sequences are packed, ordered, recomputed or differentiated."""

from __future__ import annotations

import pytest
import torch
from same_scores import assert_same

from isoexec.contract import ContractError
from isoexec.contract.manifest import Manifest, differing
from isoexec.models import qwen3
from isoexec.ops._core import registry
from isoexec.ops._core.bits import bit_equal, nudge
from isoexec.ops._core.digest import tensors_digest
from isoexec.ops.logprob import of_hidden
from tests.poison import adding_unwritten
from tests.ops.op_checks import same_bits


@pytest.fixture(scope="module")
def trainer(under_contract, model_folder):
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    trainer = PolicyTrainer(model_folder)
    yield trainer
    trainer.close()


@pytest.mark.parametrize("packing", [4096, 100, 1, [[5, 0, 3], [1], [4, 2]]])
def test_packing_moves_no_bit(trainer, sequences, alone, packing):
    assert_same(trainer.logprobs(sequences, temperature=0.7, with_rows=True, packing=packing), alone)


def test_order_moves_no_bit(trainer, sequences, alone):
    order = [3, 5, 0, 2, 1, 4]
    assert_same(trainer.logprobs([sequences[i] for i in order], temperature=0.7, with_rows=True), [alone[i] for i in order])


def test_a_forward_with_gradients_has_the_same_bits(trainer, sequences, alone):
    assert_same(trainer.logprobs(sequences, temperature=0.7, with_rows=True, grad=True), alone)
    assert not any(p.main_grad.any() for p in trainer.gpt.parameters()), "scoring must leave no gradient behind"


def test_recomputed_activations_have_the_same_bits(trainer, sequences, alone):
    before = registry.served()
    assert_same(trainer.logprobs(sequences, temperature=0.7, with_rows=True, recompute=True, packing=100), alone)
    calls = {key: n - before.get(key, 0) for key, n in registry.served().items()}
    layers = trainer.config.num_layers
    packs = 4  # 21 + 12 + 65 tokens, 68, 66, 139
    recomputed = calls["attention.varlen", "trainer_recompute", "isoexec.ops.attention.reference:varlen"]
    assert recomputed == layers * packs == calls["attention.varlen", "trainer_forward", "isoexec.ops.attention.reference:varlen"]
    assert trainer.config.recompute_granularity is None


def test_a_weight_that_changes_before_recomputation_shows(trainer, sequences, alone):
    """Negative control of the recompute test: what it compares does come from backward."""
    weight = trainer.gpt.decoder.layers[1].mlp.linear_fc2.weight
    kept = weight.detach().clone()
    packs = [list(range(len(sequences)))]

    def plant(*unused):
        with torch.no_grad():
            weight.copy_(nudge(kept, index=weight.numel() // 2, ulps=1 << 6))

    handle = trainer.gpt.output_layer.register_full_backward_pre_hook(plant)
    try:
        found = trainer.logprobs(sequences, temperature=0.7, recompute=True, packing=packs)
    finally:
        handle.remove()
        with torch.no_grad():
            weight.copy_(kept)
    assert not all(bit_equal(a.logprobs, b.logprobs) for a, b in zip(found, alone))


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


CASES = pytest.mark.parametrize("arguments", [{}, {"grad": True}, {"recompute": True}], ids=["score", "forward", "recompute"])


@CASES
def test_logprobs_alone_take_tiles_of_the_logits(trainer, sequences, alone, monkeypatch, arguments):
    """Where no rows are asked for: the same bits, and no more than a tile of logits at a time."""
    rows, whole = [], of_hidden.lm_head
    monkeypatch.setattr(of_hidden, "LOGIT_BYTES", 1 << 14)
    monkeypatch.setattr(of_hidden, "lm_head", lambda x, weight: rows.append(len(x)) or whole(x, weight))
    for index, (a, b) in enumerate(zip(trainer.logprobs(sequences, temperature=0.7, **arguments), alone, strict=True)):
        same_bits(a.logprobs, b.logprobs, f"logprobs of sequence {index}")
        assert a.row_digests is None
    assert max(rows) <= 32 < sum(rows)


@CASES
def test_memory_read_before_it_is_written_shows(trainer, sequences, monkeypatch, arguments):
    """Negative control of the poisoned memory in which every test of the trainer runs: times zero, and it is NaN."""
    monkeypatch.setattr(qwen3, "mlp_block", adding_unwritten(qwen3.mlp_block))
    found = trainer.logprobs(sequences[:2], temperature=0.7, **arguments)
    assert all(s.logprobs.isnan().all() for s in found)


def test_the_weight_manifest_is_the_checkpoints(trainer, model_folder):
    from safetensors.torch import load_file

    stored = Manifest(tensors_digest(load_file(f"{model_folder}/model.safetensors")))
    assert differing(stored, trainer.weight_manifest()) == []
    weight = trainer.gpt.decoder.layers[2].self_attention.linear_qkv.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(nudge(kept, index=kept.numel() - 1))  # of a fused parameter, the last row is the last group's value
    assert differing(stored, trainer.weight_manifest()) == ["model.layers.2.self_attn.v_proj.weight"]
    with torch.no_grad():
        weight.copy_(kept)
    trainer.gpt.register_buffer("expert_bias", torch.zeros(4))
    try:
        with pytest.raises(ContractError, match="weights: expert_bias of the trainer have no HF name"):
            trainer.weight_manifest()
    finally:
        del trainer.gpt.expert_bias


def test_the_identity_is_of_this_process(trainer):
    identity = trainer.identity()
    assert identity.role == "trainer" and identity.numerical_policy["packages"]["megatron-core"].startswith("0.18.2 ")
    assert identity.semantic["model"] == trainer.contract.model


def test_every_op_is_attributed(trainer, sequences):
    before = registry.served()
    trainer.logprobs(sequences, temperature=1.0)
    cases = {case for (op, case, by), n in registry.served().items() if n > before.get((op, case, by), 0)}
    assert cases == {"trainer_score"}


def test_the_model_attributes_by_itself(trainer, sequences):
    """A framework that calls the model directly sets no case."""
    batch = trainer._micro_batches(sequences[:1], 4096)[0]
    before = registry.served()
    with torch.no_grad():
        trainer.gpt(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed)
    key = ("matmul.lm_head", "trainer_score", "isoexec.ops.matmul.reference:lm_head")
    assert registry.served()[key] == before[key] + 1


def test_attention_is_told_the_longest_sequence_of_a_pack(trainer, sequences):
    """Its gradients take memory by it."""
    seen = Bounds()
    with registry.observing(seen):
        trainer.logprobs(sequences, temperature=1.0, packing=4096)
    assert seen and set(seen) == {(max(len(prompt) + len(generated) for prompt, generated in sequences), len(sequences))}


class Bounds(list):
    """(bound that a call of packed attention was given, its sequences)."""

    def before(self, declaration, args, kwargs):
        if declaration.name == "attention.varlen":
            self.append((kwargs.get("longest"), len(kwargs["cu_seqlens"]) - 1))

    def after(self, seen, result):
        pass

    def begin(self, sequence, position, layer=None):
        pass

    select = begin


def test_close_to_transformers_in_fp32(trainer, sequences, model_folder):
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for (prompt, generated), score in zip(sequences, trainer.logprobs(sequences, temperature=0.7), strict=True):
        ids = torch.tensor([[*prompt, *generated]])
        with torch.no_grad():
            rows = torch.log_softmax(reference(ids).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        expected = rows.gather(1, torch.tensor(generated)[:, None])[:, 0]
        difference = (score.logprobs - expected).abs()
        assert difference.max() < 0.25 and difference.mean() < 0.06, (difference.max(), difference.mean())


def test_no_generated_token(trainer, sequences, alone):
    pairs = [(sequences[0][0], []), sequences[1], (sequences[3][0], [])]
    found = trainer.logprobs(pairs, temperature=0.7, with_rows=True)
    assert [len(s.logprobs) for s in found] == [0, len(sequences[1][1]), 0] and found[0].row_digests == []
    assert_same(found[1:2], alone[1:2])
    assert [s.logprobs.shape for s in trainer.logprobs(pairs[:1], temperature=0.7)] == [(0,)]


def test_no_prompt_is_refused(trainer):
    with pytest.raises(ContractError, match="sequence 1.*at least one token"):
        trainer.logprobs([([1], [2]), ([], [3])], temperature=1.0)


def test_batches_that_are_not_packed_are_refused(trainer):
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ContractError, match="one row of packed tokens, found 2"):
        trainer.gpt(ids, ids, None)


def test_one_unpacked_sequence_has_the_bits_of_a_pack(trainer, sequences):
    ids = torch.tensor([sequences[5][0]])
    batch = trainer._micro_batches([sequences[1], (sequences[5][0], [])], 4096)[0]
    with torch.no_grad():
        unpacked = trainer.gpt(ids, torch.arange(ids.shape[1])[None], None)
        packed = trainer.gpt(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed)
    assert unpacked.dtype == torch.float32
    same_bits(unpacked[0], packed[0, -ids.shape[1] :], "logits")


def test_a_pack_that_leaves_tokens_out_is_refused(trainer, sequences):
    batch = trainer._micro_batches(sequences[:2], 4096)[0]
    batch.packed.cu_seqlens_q[-1] -= 1
    with pytest.raises(ContractError, match="cu_seqlens_q: expected to end at the 33 tokens"):
        trainer.gpt(batch.input_ids, batch.position_ids, None, packed_seq_params=batch.packed)


@pytest.mark.parametrize("argument", ["labels", "attention_mask"])
def test_arguments_outside_the_contract_are_refused(trainer, argument):
    ids = torch.zeros(1, 4, dtype=torch.int64)
    arguments = {"attention_mask": None, argument: ids}
    with pytest.raises(ContractError, match=f"GPTModel.forward: {argument}: expected None, found Tensor; "):
        trainer.gpt(ids, ids, **arguments)
