"""Weights after a sync: the engine holds the trainer's, no cached prefix of older ones is hit, and a planted fault shows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bitwise import same
from variants import SOME, sample

from isoexec.contract import CONTRACT_VARIABLE, ContractError, ExecutionContract
from isoexec.contract.manifest import differing
from isoexec.ops._core.bits import nudge
from isoexec.runtimes.handshake import check_weights
from isoexec.runtimes.vllm.engine import replace_weights
from tests.checkpoints import manifest_of

#: Every stacking there is: gated qkv, qkvz, ba, experts, a shared expert, nested names, a vision tower that is left out.
ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
#: Places in SOME of prompts of 65, 129 and 150 tokens that share no prefix.
ALONE = (5, 8, 9)


@pytest.fixture(scope="module")
def first(made):
    return made(ARCHITECTURE)[0]


@pytest.fixture(scope="module")
def second(made):
    return made(ARCHITECTURE, seed=1)[0]


@pytest.fixture(scope="module")
def contract(made):
    return ExecutionContract.from_json(open(made(ARCHITECTURE)[1], encoding="utf-8").read())


@pytest.fixture(scope="module")
def fresh(opened, first, second, prompts):
    """What each checkpoint gives in an engine that never held another one and caches no prefix."""
    found = {}
    for folder in (first, second):
        with opened(folder) as engine:
            found[folder] = sample(engine, prompts)
    return found


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM", "Glm4MoeLiteForCausalLM"])
def test_the_manifest_of_each_architecture_is_the_checkpoints(made, open_engine, architecture):
    folder, contract = made(architecture)
    with open_engine(folder, contract=contract) as engine:
        assert differing(manifest_of(folder), engine.weight_manifest()) == []


class TestSync:
    @pytest.fixture(scope="class")
    def engine(self, opened, fresh):  # one engine at a time: the fresh ones come first
        with opened(enable_prefix_caching=True) as engine:
            yield engine

    def test_the_manifest_is_the_checkpoints(self, engine, contract, first, second):
        expected = {folder: manifest_of(folder) for folder in (first, second)}
        versions = {check_weights(contract, {"trainer": expected[first], "engine": engine.weight_manifest()})}
        engine.load_weights(second)
        versions.add(check_weights(contract, {"trainer": expected[second], "engine": engine.weight_manifest()}))
        assert len(versions) == 2
        engine.load_weights(first)
        assert check_weights(contract, {"trainer": expected[first], "engine": engine.weight_manifest()}) in versions

    @pytest.mark.parametrize(
        "name",
        [
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.layers.0.linear_attn.in_proj_qkv.weight",
            "model.layers.0.linear_attn.in_proj_z.weight",
            "model.layers.1.linear_attn.in_proj_a.weight",
            "model.layers.1.linear_attn.A_log",
            "model.layers.2.mlp.experts.3.up_proj.weight",
            "model.layers.2.mlp.experts.5.down_proj.weight",
            "model.layers.2.mlp.shared_expert.gate_proj.weight",
            "model.layers.3.self_attn.k_proj.weight",
            "model.norm.weight",
        ],
    )
    def test_one_stale_element_is_found_by_name(self, engine, first, contract, name):
        """As after a wake-up, or a sync, that forgot a tensor: one ulp of one element is enough."""
        from isoexec.runtimes.vllm import weights

        [view] = [tensor for hf, tensor in weights.hf_tensors(engine._runner.get_model()) if hf == name]
        kept = view.clone()
        with torch.no_grad():
            view.copy_(nudge(kept, index=kept.numel() - 1))
        try:
            with pytest.raises(ContractError, match=rf"^weights.{name}: trainer has .*, engine has .*; 1 of \d+ tensors differ"):
                check_weights(contract, {"trainer": manifest_of(first), "engine": engine.weight_manifest()})
        finally:
            with torch.no_grad():
                view.copy_(kept)
        assert differing(manifest_of(first), engine.weight_manifest()) == []

    @pytest.mark.parametrize("name", ["A_log", "dt_bias"])
    def test_a_silent_cast_is_refused(self, engine, first, contract, name):
        layer = engine._runner.get_model().language_model.model.layers[0].linear_attn
        parameter, kept = getattr(layer, name), getattr(layer, name).data
        parameter.data = kept.bfloat16()
        try:
            with pytest.raises(ContractError, match=f"layers.0.linear_attn.{name}: dtype: the contract says float32, engine has bfloat16"):
                check_weights(contract, {"trainer": manifest_of(first), "engine": engine.weight_manifest()})
        finally:
            parameter.data = kept

    def test_a_buffer_that_nobody_digests_is_refused(self, engine):
        model = engine._runner.get_model()
        model.register_buffer("expert_bias", torch.zeros(4))
        try:
            with pytest.raises(ContractError, match="weights: buffers expert_bias of the engine have no HF name"):
                engine.weight_manifest()
        finally:
            del model.expert_bias

    def test_a_sync_under_running_sequences_is_refused(self, engine, prompts, first):
        from vllm import SamplingParams

        core = engine._llm.llm_engine
        params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, detokenize=False)
        core.add_request("running", {"prompt_token_ids": prompts[11]}, params)
        core.step()
        before = engine.weight_manifest()
        with pytest.raises(ContractError, match="weights: expected no running sequence at a sync"):
            engine.load_weights(first)
        assert differing(before, engine.weight_manifest()) == []
        while core.has_unfinished_requests():
            core.step()
        engine.load_weights(first)

    @pytest.mark.parametrize(
        ("level", "moved"), [(1, False), (1, True), (2, True)], ids=["the same weights", "a sync on waking", "weights discarded"]
    )
    def test_asleep_and_awake(self, engine, first, second, prompts, fresh, contract, level, moved):
        """vLLM's own sleep, in the order of a run whose sides share memory. Whose weights woke is compared, not believed.

        The CPU's worker keeps its weights at every level; what level 2 leaves on a GPU is memory that holds anything.
        """
        folder, llm = (second if moved else first), engine._llm

        def compared():
            return check_weights(contract, {"trainer": manifest_of(folder), "engine": engine.weight_manifest()})

        def alone():
            return [sample(engine, prompts, [SOME[n]])[0] for n in ALONE]

        engine.load_weights(first)
        alone()
        assert sum(r.num_cached_tokens for r in alone()) > 0, "nothing was cached that a wake-up could hit"
        llm.sleep(level=level)
        assert llm.llm_engine.is_sleeping()
        llm.wake_up(tags=["weights"])
        if level == 2:
            for parameter in engine._runner.get_model().parameters():
                parameter.data.fill_(float("nan"))
        if moved:
            with pytest.raises(ContractError, match=r"^weights\..*: trainer has .*, engine has .*tensors differ"):
                compared()
            engine.load_weights(second)
        compared()
        llm.wake_up(tags=["kv_cache"])
        assert not llm.llm_engine.is_sleeping()
        found = alone()
        assert not any(r.num_cached_tokens for r in found) and all(same(found, [fresh[folder][n] for n in ALONE]))

    @pytest.mark.parametrize("barriers", [("flush", "version"), ("flush",), ("version",), ()], ids=lambda b: "-".join(b) or "none")
    def test_no_stale_prefix_is_hit(self, engine, first, second, prompts, fresh, monkeypatch, barriers):
        """Generate, sync, generate, and sync back: each barrier alone is enough, and without both the stale hit is seen."""
        if "flush" not in barriers:
            monkeypatch.setattr(engine, "reset_prefix_cache", lambda: None)

        def sync(folder):
            engine.load_weights(folder)
            if "version" not in barriers:
                engine._syncs = 0

        def alone():
            """One by one: of a batch, later prompts may hit what earlier ones have just computed. None is the beginning of another."""
            return [sample(engine, prompts, [SOME[n]])[0] for n in ALONE]

        engine.load_weights(first)
        engine._llm.reset_prefix_cache()
        monkeypatch.setattr(engine, "_syncs", 0)
        assert all(same(sample(engine, prompts), fresh[first]))
        assert sum(r.num_cached_tokens for r in alone()) > 0, "nothing was cached, so nothing could be stale"
        for folder in (second, first):
            sync(folder)
            found = alone()
            stale = sum(r.num_cached_tokens for r in found) > 0
            equal = all(same(found, [fresh[folder][n] for n in ALONE]))
            if barriers:
                assert not stale and equal, folder
            else:
                assert stale
                assert folder == first or not equal, "the stale hit must show in the bits"


def test_a_parameter_that_a_load_moves_is_refused(made, monkeypatch):
    """A captured step reads where the old values lie; a manifest of the model would show the new ones."""

    class Model(torch.nn.Linear):
        moves = False

        def load_weights(self, tensors):
            for name, tensor in tensors:
                self.get_parameter(name).data.copy_(tensor)
            if self.moves:
                self.bias.data = self.bias.data.clone()
            return {"weight", "bias"}

    monkeypatch.setenv(CONTRACT_VARIABLE, made(ARCHITECTURE)[1])
    model = Model(2, 2)
    runner = SimpleNamespace(get_model=lambda: model)
    replace_weights(runner, [("weight", torch.ones(2, 2))])
    model.moves = True
    with pytest.raises(ContractError, match=r"weights: bias: expected its new values where the old ones lay.*1 of 2"):
        replace_weights(runner, [("weight", torch.ones(2, 2))])
