"""What SkyRL adds between Megatron's logits and the logprobs that a run compares: temperature, shift and gather are isoexec's ops.

The wrapper that a policy worker drives (:class:`isoexec.runtimes.skyrl.wrapper.ContractWrapper`), on a real Megatron model, under audit.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from isoexec.contract import active_contract
from isoexec.ops import logprob
from isoexec.ops._core import registry
from isoexec.verify.audit.recorder import Recorder

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("skyrl") is None:
    pytest.skip("megatron-core and SkyRL are not installed; run `make build`", allow_module_level=True)

LENGTHS, RESPONSE, TEMPERATURE = ((3, 5), (7, 2), (1, 6)), 6, 0.7


@pytest.fixture(scope="module")
def wrapper(audited_model, contract_chosen, tmp_path_factory):
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    from isoexec.runtimes.megatron.trainer import PolicyTrainer
    from isoexec.runtimes.skyrl.config import resolve
    from isoexec.runtimes.skyrl.ratio import with_ratio
    from isoexec.runtimes.skyrl.wrapper import ContractWrapper
    from isoexec.verify.engine_worker import choose_contract
    from tests.skyrl.small_run import small_config

    model, contract = audited_model
    choose_contract(contract)
    trainer = PolicyTrainer(model)
    config = resolve(small_config(model, tmp_path_factory.mktemp("run"))).trainer
    made = ContractWrapper(
        config=config,
        actor_module=[trainer.ddp],
        policy_loss_fn=with_ratio(PolicyLossRegistry.get("dual_clip")),
        contract=active_contract(),
        vocab_size=512,
        sequence_parallel=False,
    )
    yield made
    trainer.close()


@pytest.fixture(scope="module")
def batch():
    """Prompts on the left, responses on the right, padding on both ends."""
    generator = torch.Generator().manual_seed(9)
    before = max(prompt for prompt, _ in LENGTHS)
    size = before + RESPONSE
    mask = torch.zeros(len(LENGTHS), size, dtype=torch.long)
    for row, (prompt, response) in enumerate(LENGTHS):
        mask[row, before - prompt : before + response] = 1
    loss_mask = mask[:, before:].float()
    old = -torch.rand(len(LENGTHS), RESPONSE, generator=generator)
    return {
        "sequences": torch.randint(3, 512, (len(LENGTHS), size), generator=generator) * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "num_actions": RESPONSE,
        "old_action_log_probs": old,
        "base_action_log_probs": old,
        "rollout_action_logprobs": old,
        "advantages": torch.randn(old.shape, generator=generator),
        "loss_mask": loss_mask,
        "action_mask": loss_mask.long(),
        "num_microbatches": 1,
    }


def scored(wrapper, batch):
    return wrapper.forward([dict(batch)], batch["sequences"].shape[1], len(LENGTHS), temperature=TEMPERATURE)


def trained(wrapper, batch):
    [metrics] = wrapper.forward_backward_mini_batch([dict(batch)], batch["sequences"].shape[1], len(LENGTHS), temperature=TEMPERATURE)
    return metrics


def named(recorder):
    return {(stray.op, stray.file.rpartition("/")[2], stray.function) for stray in recorder.strays}


def test_nothing_strays_on_the_way_to_the_logprobs_of_a_run(wrapper, batch):
    recorder = Recorder(lambda: "trainer_score")
    with recorder.observing(), torch.no_grad():
        recorder.expect_logprob(scored(wrapper, batch))
    assert not recorder.strays, recorder.strays
    assert recorder.inside["trainer_score"] > 50
    ops = {op for op, case, _ in registry.served() if case == "trainer_score"}
    assert {"logprob.scale_by_temperature", "logprob.token_logprob"} <= ops


def test_a_stray_temperature_of_skyrls_is_reported(wrapper, batch, monkeypatch):
    """Upstream's own division, which its wrapper does in place."""
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper

    def upstreams(self, logits, temperature):
        with registry.on_logprob_path():
            return MegatronModelWrapper.scale_logits(logits, temperature)

    monkeypatch.setattr(type(wrapper), "scale_logits", upstreams)
    recorder = Recorder(lambda: "trainer_score")
    with recorder.observing(), torch.no_grad():
        scored(wrapper, batch)
    assert named(recorder) == {("aten.div_.Tensor", "megatron_model_wrapper.py", "scale_logits")}


def test_in_training_only_the_loss_reads_what_the_ops_made(wrapper, batch):
    """Nothing strays: the loss and its statistics are declared to lie beyond the logprob, and no op reads them again."""
    recorder = Recorder(lambda: "trainer_forward")
    with recorder.observing():
        metrics = trained(wrapper, batch)
    assert not recorder.strays, recorder.strays
    assert recorder.inside["trainer_forward"] > 50 and metrics["policy_loss"] != 0


def test_scoring_and_training_take_the_logprobs_of_the_tokens_that_follow(wrapper, batch, monkeypatch):
    """Shift and gather by the definition: each response token's logprob from the logits of the token before it, a sequence at a time."""
    from megatron.core.packed_seq_params import PackedSeqParams

    with torch.no_grad():
        found = scored(wrapper, batch)
    in_training = []

    def loss(log_probs, *args, **kwargs):
        in_training.append(log_probs.detach())
        return policy_loss(log_probs, *args, **kwargs)

    policy_loss = wrapper.policy_loss_fn
    monkeypatch.setattr(wrapper, "policy_loss_fn", loss)
    trained(wrapper, batch)
    assert torch.equal(in_training[0].view(torch.int32), found.view(torch.int32))
    [model], sizes = wrapper.actor_module, {"vocab_size": 512, "vocab_block": active_contract().numerics.vocab_block}
    for row, (prompt, response) in enumerate(LENGTHS):
        tokens = batch["sequences"][row][batch["attention_mask"][row].bool()]
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        with torch.no_grad(), registry.executing("trainer_score"):
            logits = model(tokens[None], None, None, packed_seq_params=packed)
            scaled = logprob.scale_by_temperature(logits[0], torch.tensor(TEMPERATURE))
            expected = logprob.token_logprob(scaled[:-1], tokens[1:], **sizes)[prompt - 1 :]
        assert torch.equal(found[row, :response].view(torch.int32), expected.view(torch.int32))
        assert not found[row, response:].any()
