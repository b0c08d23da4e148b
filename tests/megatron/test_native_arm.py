"""Without a contract: upstream's modules and numerics, and no op of ours."""

from __future__ import annotations

import pytest
import torch

from isoexec.ops._core import registry


@pytest.fixture(scope="module")
def trainer(without_contract, model_folder):
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    trainer = PolicyTrainer(model_folder)
    yield trainer
    trainer.close()


def test_the_modules_are_upstreams(trainer):
    types = {type(module) for module in trainer.gpt.modules()}
    ours = [t for t in types if t.__module__.startswith("isoexec")]
    assert not ours
    names = {t.__name__ for t in types}
    assert {"TransformerLayer", "DotProductAttention", "RMSNorm", "VocabParallelEmbedding", "RotaryEmbedding"} <= names


def test_no_op_of_ours_runs(trainer, sequences):
    before = registry.served()
    trainer.logprobs(sequences, temperature=1.0, with_rows=True)
    trainer.logprobs(sequences, temperature=1.0, recompute=True)
    trainer.train_step(sequences, None, 1.0)
    assert registry.served() == before


def test_both_arms_compute_the_same_policy(trainer, sequences, model_folder, contract_file):
    """Close in value; that they are not equal is what the contract is for."""
    from isoexec.contract import CONTRACT_VARIABLE
    from isoexec.runtimes.megatron.trainer import PolicyTrainer

    native = PolicyTrainer(model_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CONTRACT_VARIABLE, contract_file)
        contracted = PolicyTrainer(model_folder)
    a, b = (torch.cat([s.logprobs for s in t.logprobs(sequences, temperature=0.7)]) for t in (native, contracted))
    for t in (native, contracted):
        t.close()
    assert not torch.equal(a, b)
    assert (a - b).abs().max() < 0.25 and (a - b).abs().mean() < 0.06


def test_recompute_and_gradients_agree(trainer, sequences):
    plain = trainer.logprobs(sequences, temperature=1.0, packing=[[i] for i in range(len(sequences))])
    for other in ({"grad": True}, {"recompute": True}):
        found = trainer.logprobs(sequences, temperature=1.0, packing=[[i] for i in range(len(sequences))], **other)
        for a, b in zip(plain, found):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=0.1, rtol=0)


def test_the_adapter_hands_back_what_it_is_given(without_contract):
    from isoexec.runtimes import megatron as adapter

    spec, forward = object(), lambda x: x + 1
    assert adapter.decoder_spec(None, spec) is spec
    assert adapter.module(dict) is dict
    assert adapter.attributed(forward)(1) == 2
    with adapter.recomputing():
        assert registry.current_case() is None


def test_devices_with_cuda_are_upstreams(monkeypatch):
    from megatron.core import device

    assert device.current_device() == torch.device("cpu") and device.device_type() == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device.current_device() == 3 and device.device_type() == "cuda"
