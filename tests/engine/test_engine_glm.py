"""GLM-4.7-Flash: a sequence's bits depend on its prompt, seed and the weights; keys and values lie in the cache head by head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import variants
from bitwise import same
from variants import sample

from isoexec.contract import ContractError
from isoexec.ops._core import registry
from isoexec.ops._core.bits import assert_bit_equal

ARCHITECTURE = "Glm4MoeLiteForCausalLM"


class Bounds(list):
    """(bound that a call of paged attention was given, new tokens of each of its sequences)."""

    def before(self, declaration, args, kwargs):
        if declaration.name == "attention.paged":
            self.append((kwargs.get("longest"), args[5].diff().tolist()))

    def after(self, seen, result):
        pass

    def begin(self, *rows):
        pass

    select = idle = begin


def test_a_bound_that_leaves_rows_out_is_refused():
    from isoexec.runtimes.vllm.attention import MetadataBuilder

    step = SimpleNamespace(causal=True, num_reqs=2, max_query_len=1, query_start_loc_cpu=torch.tensor([0, 1, 3, 9]))
    with pytest.raises(ContractError, match="max_query_len: expected 2 or more, .*, found 1"):
        MetadataBuilder.build(None, 0, step)
    with pytest.raises(ContractError, match="max_query_len: expected 1 in a step that is captured, found 2"):
        MetadataBuilder.build_for_cudagraph_capture(None, SimpleNamespace(max_query_len=2))


class TestOneEngine:
    def test_ops_of_both_cases(self, together):
        served = {(op, case) for op, case, _ in registry.served()}
        for op in ("rope.apply_rope", "moe.route", "moe.combine", "attention.paged"):
            assert {(op, "engine_prefill"), (op, "engine_decode")} <= served, op

    def test_attention_is_told_the_most_new_tokens_of_a_sequence(self, engine, prompts):
        """Decode steps of several sequences say 1, by which a GPU chooses its kernel."""
        seen = Bounds()
        engine.reset_prefix_cache()
        with registry.observing(seen):
            sample(engine, prompts)
        assert all(longest == max(new) for longest, new in seen)
        assert any(longest == 1 < len(new) for longest, new in seen) and max(longest for longest, _ in seen) > 100

    def test_alone_and_permuted(self, engine, prompts, together):
        variants.assert_alone_and_permuted(engine, prompts, together)

    def test_prefill_rescores_what_decode_sampled(self, engine, prompts, together):
        variants.assert_prefill_rescores(engine, prompts, together)

    def test_eviction_at_every_position(self, engine, prompts, together):
        variants.assert_evicted(engine, prompts, together)

    def test_negative_control_and_reload(self, engine, made, tmp_path, prompts, together):
        variants.assert_reload(engine, made(ARCHITECTURE)[0], tmp_path, prompts, together, "layers.2.self_attn.kv_a_layernorm.weight")

    def test_the_experts_bias_is_fp32_and_travels_with_the_weights(self, engine, made, tmp_path, prompts, together):
        from safetensors.torch import load_file, save_file

        tensors = load_file(made(ARCHITECTURE)[0] / "model.safetensors")
        layers = engine._runner.get_model().model.layers
        for index in (1, 2, 3):
            name = f"model.layers.{index}.mlp.gate.e_score_correction_bias"
            assert_bit_equal(layers[index].mlp.gate.e_score_correction_bias.detach(), tensors[name], name)
            tensors[name] = tensors[name].flip(0)
        save_file(tensors, tmp_path / "flipped.safetensors")
        engine.load_weights(tmp_path / "flipped.safetensors")
        assert not any(same(sample(engine, prompts), together)[4:])
        engine.load_weights(made(ARCHITECTURE)[0])
        assert all(same(sample(engine, prompts), together))

    def test_the_manifest_names_every_tensor(self, engine, made):
        from safetensors.torch import load_file

        tensors, digests = load_file(made(ARCHITECTURE)[0] / "model.safetensors"), engine.weight_manifest().tensors
        assert digests.keys() == tensors.keys()
        assert all(digests[name].dtype == str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items())

    def test_cache_of_heads(self, engine):
        """Four heads of 64 channels, queries' size; values have 32 of them."""
        assert {tuple(cache.shape[1:]) for cache in engine._runner.kv_caches} == {(2, 32, 4, 64)}


def test_chunked_prefill(opened, prompts, together):
    with opened(max_num_batched_tokens=33, max_num_seqs=8) as engine:
        assert all(same(sample(engine, prompts), together))


def test_preemption(opened, prompts):
    variants.assert_preemption(opened, prompts, kv_cache_tokens=256)


def test_prefix_cache(opened, prompts, together):
    with opened(enable_prefix_caching=True) as engine:
        variants.assert_prefix_cache(engine, prompts, together, at_least=500)


def test_without_a_contract_the_engine_computes_the_same_function(made, open_engine, prompts, together):
    """Upstream's rotary kernel for the CPU takes a head for a token where heads are split; the mean was 0.5 nats with it."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False)
    differences = []
    with open_engine(made(ARCHITECTURE)[0], contract=None) as engine:
        outputs = engine.request([rollout.prompt + rollout.tokens for rollout in together], [params] * len(together))
    for rollout, output in zip(together, outputs, strict=True):
        for n, (token, logprob) in enumerate(zip(rollout.tokens, rollout.logprobs, strict=True)):
            differences.append(abs(output.prompt_logprobs[len(rollout.prompt) + n][token].logprob - logprob))
    assert 0 < sum(differences) / len(differences) < 0.15


def test_refused_router(opened, made, tmp_path, open_engine):
    import json
    import shutil

    folder, contract = made(ARCHITECTURE)
    shutil.copytree(folder, tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text()) | {"norm_topk_prob": False}
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ContractError, match="norm_topk_prob: expected None or True, found False"):
        with open_engine(tmp_path / "bare", contract=contract):
            pass
