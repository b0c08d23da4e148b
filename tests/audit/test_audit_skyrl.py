"""What SkyRL adds between Megatron's hidden states and the logprobs that a run compares: head, temperature and gather are isoexec's ops,
and no logits are held.

The wrapper that a policy worker drives (:class:`isoexec.runtimes.skyrl.wrapper.ContractWrapper`), on a real Megatron model, under audit.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from isoexec.contract import active_contract
from isoexec.contract.build import contract_for_model
from isoexec.ops import logprob
from isoexec.ops._core import registry
from isoexec.ops.logprob import of_hidden
from isoexec.verify.audit import trainer_worker
from isoexec.verify.audit.recorder import Recorder
from isoexec.verify.engine_worker import choose_contract
from tests.audit.skyrl_wrapper import LENGTHS, RESPONSE, TEMPERATURE, batch_of, scored, trained, wrapped
from tests.ops.op_checks import same_bits

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("skyrl") is None:
    pytest.skip("megatron-core and SkyRL are not installed; run `make build`", allow_module_level=True)

VOCAB = 8192  # so that logits are what takes memory


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    """(checkpoint, contract file) of a dense model of two layers."""
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    trainer_worker.make_checkpoint(str(folder), "Qwen3ForCausalLM", {"num_hidden_layers": 2, "vocab_size": VOCAB})
    file = tmp_path_factory.mktemp("contract") / "contract.json"
    file.write_text(contract_for_model(folder, "cpu").to_json())
    return str(folder), str(file)


@pytest.fixture(scope="module")
def wrapper(wide_model, contract_chosen, tmp_path_factory):
    model, contract = wide_model
    choose_contract(contract)
    trainer, made = wrapped(model, tmp_path_factory.mktemp("run"), VOCAB)
    yield made
    trainer.close()


@pytest.fixture(params=[False, True], ids=["from hidden states", "from logits"])
def either(request, wrapper, monkeypatch):
    """The wrapper as it is, and as an entropy in the loss makes it."""
    monkeypatch.setattr(wrapper, "_makes_logits", request.param)
    return wrapper


@pytest.fixture(scope="module")
def batch():
    return batch_of(LENGTHS, RESPONSE, VOCAB)


def gradients(wrapper):
    [model] = wrapper.actor_module
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def most_held(run) -> int:
    """Bytes that torch's allocator gives, beyond those it had given, at most, while ``run`` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    return int(held.cumsum(0).max())


def named(recorder):
    return {(stray.op, stray.file.rpartition("/")[2], stray.function) for stray in recorder.strays}


def test_nothing_strays_on_the_way_to_the_logprobs_of_a_run(either, batch):
    recorder = Recorder(lambda: "trainer_score")
    with recorder.observing():
        recorder.expect_logprob(scored(either, batch))
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
    monkeypatch.setattr(wrapper, "_makes_logits", True)
    recorder = Recorder(lambda: "trainer_score")
    with recorder.observing():
        scored(wrapper, batch)
    assert named(recorder) == {("aten.div_.Tensor", "megatron_model_wrapper.py", "scale_logits")}


def test_a_stray_before_the_head_is_reported(wrapper, batch, monkeypatch):
    def strayed(x, *rest):
        return score(x * 1.0, *rest)

    score = wrapper._score
    monkeypatch.setattr(wrapper, "_score", strayed)
    recorder = Recorder(lambda: "trainer_score")
    with recorder.observing():
        scored(wrapper, batch)
    assert named(recorder) == {("aten.mul.Tensor", "test_audit_skyrl.py", "strayed")}


def test_in_training_only_the_loss_reads_what_the_ops_made(either, batch):
    """Nothing strays: the loss and its statistics are declared to lie beyond the logprob, and no op reads them again."""
    recorder = Recorder(lambda: "trainer_forward")
    with recorder.observing():
        metrics = trained(either, batch)
    assert not recorder.strays, recorder.strays
    assert recorder.inside["trainer_forward"] > 50 and metrics["policy_loss"] != 0


def test_scoring_and_training_take_the_logprobs_of_the_tokens_that_follow(either, batch, monkeypatch):
    """Shift and gather by the definition: each response token's logprob from the logits of the token before it, a sequence at a time."""
    from megatron.core.packed_seq_params import PackedSeqParams

    found = scored(either, batch)
    in_training = []

    def loss(log_probs, *args, **kwargs):
        in_training.append(log_probs.detach())
        return policy_loss(log_probs, *args, **kwargs)

    policy_loss = either.policy_loss_fn
    monkeypatch.setattr(either, "policy_loss_fn", loss)
    trained(either, batch)
    assert torch.equal(in_training[0].view(torch.int32), found.view(torch.int32))
    [model], sizes = either.actor_module, {"vocab_size": VOCAB, "vocab_block": active_contract().numerics.vocab_block}
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


def test_hidden_states_and_logits_give_the_same_bits(wrapper, batch, monkeypatch):
    """Logprobs, loss, entropy and, in one tile of the logits, gradients."""
    found, metrics, steps = scored(wrapper, batch), trained(wrapper, batch), gradients(wrapper)
    monkeypatch.setattr(wrapper, "_makes_logits", True)
    same_bits(scored(wrapper, batch), found, "logprobs")
    assert trained(wrapper, batch) == metrics and metrics["policy_entropy"] > 1
    whole = gradients(wrapper)
    for name, gradient in steps.items():
        same_bits(gradient, whole[name], name)
    monkeypatch.setattr(wrapper, "_makes_logits", False)
    monkeypatch.setattr(of_hidden, "LOGIT_BYTES", 1 << 10)
    same_bits(scored(wrapper, batch), found, "logprobs, by tiles")
    assert trained(wrapper, batch) == metrics
    for name, gradient in gradients(wrapper).items():
        assert (gradient - whole[name]).norm() <= 4e-3 * whole[name].norm(), name


def test_an_entropy_in_the_loss_has_its_gradient(wrapper, batch, monkeypatch):
    trained(wrapper, batch)
    without = gradients(wrapper)
    algorithm = wrapper.cfg.algorithm
    monkeypatch.setattr(algorithm, "use_entropy_loss", True)
    monkeypatch.setattr(algorithm, "entropy_loss_coef", 1.0)
    with pytest.raises(NotImplementedError, match="set trainer.algorithm.use_entropy_loss"):  # without logits it would have none
        trained(wrapper, batch)
    monkeypatch.setattr(wrapper, "_makes_logits", True)
    trained(wrapper, batch)
    assert any((without[name] != gradient).any() for name, gradient in gradients(wrapper).items())


@pytest.mark.parametrize("run", [scored, trained])
def test_no_logits_are_held(wrapper, monkeypatch, run):
    """Of 800 tokens, in tiles of 1 MB. Negative control: whole they are 26 MB, twice, before and after the temperature."""
    long = batch_of([(40, 60)] * 8, 60, VOCAB)
    logits = 800 * VOCAB * 4
    monkeypatch.setattr(of_hidden, "LOGIT_BYTES", 1 << 20)
    tiles = most_held(lambda: run(wrapper, long))
    monkeypatch.setattr(wrapper, "_makes_logits", True)
    whole = most_held(lambda: run(wrapper, long))
    print(f"{run.__name__}: at most {tiles / 1e6:.1f} MB by tiles, {whole / 1e6:.1f} MB whole; logits of {logits / 1e6:.1f} MB")
    assert tiles < logits and whole > 2 * logits
