"""A sequence's tokens, logprobs and whole log-probability rows depend on its prompt, seed and the weights: on nothing else."""

from __future__ import annotations

import math
import struct

import pytest
import torch
import variants
from bitwise import bits, same
from variants import SEEDS, TOKENS, sample

from isoexec.models import qwen3
from isoexec.ops._core import registry
from isoexec.ops._core.bits import nudge
from tests.poison import adding_unwritten


@pytest.fixture(scope="module")
def together(opened, prompts):
    """All 64 prompts in one batch: what every other way of running them must give."""
    with opened() as engine:
        return sample(engine, prompts, range(64))


class TestOneEngine:
    def test_a_batch_runs_on_ops_in_both_cases(self, together):
        """Every op of the path served prefill and decode, and each sequence has its tokens and finite logprobs."""
        assert [len(r.tokens) for r in together] == [TOKENS] * 64
        assert all(torch.tensor(r.logprobs).isfinite().all() for r in together)
        served = {(op, case) for op, case, _ in registry.served()}
        for op in ("embedding.embedding", "rope.rope_table", "rope.apply_rope", "norm.rms_norm", "norm.add_rms_norm", "matmul.linear",
                   "matmul.row_parallel_linear", "matmul.lm_head", "activation.silu_mul", "attention.write_cache", "attention.paged",
                   "logprob.scale_by_temperature", "logprob.log_softmax", "sampling.draw"):  # fmt: skip
            assert {(op, "engine_prefill"), (op, "engine_decode")} <= served, op
        assert torch.get_num_threads() == 1

    def test_alone(self, engine, prompts, together):
        for i in (0, 5, 8, 10, 11, 24):
            assert same(sample(engine, prompts, [i]), [together[i]]) == [True], i

    @pytest.mark.parametrize("size", [2, 3, 8, 17])
    def test_batch_size(self, engine, prompts, together, size):
        which = list(range(40, 40 + size))
        assert all(same(sample(engine, prompts, which), [together[i] for i in which]))

    def test_every_number_in_flight(self, engine, prompts, together):
        """1 to 64 short sequences at once."""
        short = [i for i in range(64) if len(prompts[i]) <= 33]
        for size in range(1, 65):
            which = [short[(size + i) % len(short)] for i in range(size)]
            assert all(same(sample(engine, prompts, which), [together[i] for i in which])), size

    def test_order_of_submission(self, engine, prompts, together):
        which = [(37 * i + 11) % 64 for i in range(64)]
        assert all(same(sample(engine, prompts, which), [together[i] for i in which]))

    def test_prefill_rescores_what_decode_sampled(self, engine, prompts, together):
        """Prompt logprobs of prompt + tokens, computed in one prefill, are the sampled logprobs."""
        from vllm import SamplingParams

        which = [0, 2, 4, 7, 10, 11]
        params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False)
        outputs = engine.request([prompts[i] + together[i].tokens for i in which], [params] * len(which))
        for i, output in zip(which, outputs, strict=True):
            rescored = [output.prompt_logprobs[len(prompts[i]) + n][token].logprob for n, token in enumerate(together[i].tokens)]
            assert [struct.pack("<f", x) for x in rescored] == [struct.pack("<f", x) for x in together[i].logprobs], i

    def test_temperature(self, engine, prompts, together):
        """T = 0.7: the same bits alone and batched, of softmax(logits / 0.7)."""
        from vllm import SamplingParams

        which = [1, 7, 11]
        warm = sample(engine, prompts, which, temperature=0.7)
        assert all(same(warm, [sample(engine, prompts, [i], temperature=0.7)[0] for i in which]))

        def first_row(temperature):
            params = SamplingParams(max_tokens=1, temperature=temperature, seed=0, logprobs=-1, flat_logprobs=True, detokenize=False)
            flat = engine.request([prompts[11]], [params])[0].outputs[0].logprobs
            row = torch.empty(512, dtype=torch.float64)
            row[torch.tensor(flat.token_ids)] = torch.tensor(flat.logprobs, dtype=torch.float64)
            return row

        expected = (first_row(1.0) / 0.7).log_softmax(-1)
        torch.testing.assert_close(first_row(0.7), expected, atol=2e-6, rtol=2e-6)
        assert (first_row(1.0) - expected).abs().max() > 0.1

    @pytest.mark.parametrize("position", range(1, TOKENS))
    def test_preemption_at_every_position(self, engine, prompts, together, position):
        """Evicted after ``position`` tokens, sequences are recomputed and go on in the same bits."""
        which, before = [0, 4, 7, 10, 11], engine.num_preemptions
        assert all(same(sample(engine, prompts, which, evict_at=(position,)), [together[i] for i in which]))
        assert engine.num_preemptions - before == len(which)

    def test_seed_decides_what_is_sampled(self, engine, prompts, together):
        again = engine.generate([prompts[11]] * 2, [SEEDS[11], 7], 1.0, TOKENS, record_rows=True)
        assert bits(again[0]) == bits(together[11])
        assert again[0].tokens != again[1].tokens
        assert again[0].row_digests[0] == again[1].row_digests[0]  # the first row is of the same prompt

    def test_negative_control_one_ulp_of_one_weight(self, engine, checkpoint, tmp_path, prompts, together):
        """A single bf16 ulp of one weight turns the comparison red, and loading the weights back turns it green."""
        from safetensors.torch import load_file, save_file

        tensors = load_file(checkpoint / "model.safetensors")
        # Of a layer's weights, most would be rounded away with the layer's output; a logit is fp32 and keeps it.
        tensors["lm_head.weight"] = nudge(tensors["lm_head.weight"], index=77)
        save_file(tensors, tmp_path / "nudged.safetensors")
        which = [0, 10, 11]
        expected = [together[i] for i in which]
        engine.load_weights(tmp_path / "nudged.safetensors")
        assert not any(same(sample(engine, prompts, which), expected))
        engine.load_weights(checkpoint)
        assert all(same(sample(engine, prompts, which), expected))

    def test_negative_control_memory_read_before_it_is_written(self, engine, prompts, together, monkeypatch):
        """Times zero, and it shows: every buffer of the engine that nobody has written holds NaN."""
        monkeypatch.setattr(qwen3, "mlp_block", adding_unwritten(qwen3.mlp_block))
        found = sample(engine, prompts, [0, 10])
        assert all(math.isnan(x) for r in found for x in r.logprobs)
        monkeypatch.undo()
        assert all(same(sample(engine, prompts, [0, 10]), [together[0], together[10]]))

    def test_a_sync_that_leaves_a_parameter_out_is_refused(self, engine, checkpoint, tmp_path):
        from safetensors.torch import load_file, save_file

        tensors = load_file(checkpoint / "model.safetensors")
        del tensors["model.layers.1.self_attn.k_norm.weight"]
        save_file(tensors, tmp_path / "partial.safetensors")
        with pytest.raises(ValueError, match="layers.1.self_attn.k_norm.weight"):
            engine.load_weights(tmp_path)
        engine.load_weights(checkpoint)


def test_chunked_prefill(open_engine, checkpoint, prompts, together):
    """Budgets that cut prompts anywhere: a prompt of 150 tokens takes five steps, and its discarded draws leave no trace."""
    which = list(range(24))
    with open_engine(checkpoint, max_num_batched_tokens=33, max_num_seqs=16) as chunked:
        assert all(same(sample(chunked, prompts, which), [together[i] for i in which]))


def test_257_at_once(open_engine, checkpoint, prompts, together):
    which = [i % 64 for i in range(257)]
    with open_engine(checkpoint, max_num_seqs=257) as engine:
        assert all(same(sample(engine, prompts, which), [together[i] for i in which]))


def test_preemption(open_engine, checkpoint, prompts):
    """Sequences that grow until the cache is full are evicted and recomputed."""
    which = [2, 3, 4, 5, 14, 15, 16, 26]
    with open_engine(checkpoint) as engine:
        expected = sample(engine, prompts, which, tokens=40)
        assert engine.num_preemptions == 0
    with open_engine(checkpoint, kv_cache_tokens=256, max_model_len=128) as tight:
        evicted = sample(tight, prompts, which, tokens=40)
        assert tight.num_preemptions > 0
    assert all(same(evicted, expected))


def test_a_cache_hit_moves_the_cuts_of_chunks(open_engine, checkpoint, prompts, together):
    """What is left of a prompt after a hit is cut elsewhere than the whole prompt was; scored prompts as well as sampled tokens."""
    which = list(range(6, 24))
    expected = [together[i] for i in which]
    with open_engine(checkpoint, enable_prefix_caching=True, max_num_batched_tokens=33, max_num_seqs=8) as engine:
        assert all(same(sample(engine, prompts, which), expected))
        warm = sample(engine, prompts, which)
        assert sum(r.num_cached_tokens for r in warm) > 500 and all(same(warm, expected))
        assert all(same(sample(engine, prompts, which[::-1])[::-1], expected))
        variants.assert_prefill_rescores(engine, prompts, [together[i] for i in variants.SOME])


def test_prefix_cache_and_weight_sync(open_engine, checkpoint, other_checkpoint, prompts, together):
    """Cold, warm and permuted give the same bits; after a sync no prefix of the old weights is hit."""
    which = list(range(6, 24))
    expected = [together[i] for i in which]
    with open_engine(checkpoint, enable_prefix_caching=True) as caching:
        assert all(same(sample(caching, prompts, which), expected))
        warm = sample(caching, prompts, which)
        assert sum(r.num_cached_tokens for r in warm) > 500
        assert all(same(warm, expected))
        assert all(same(sample(caching, prompts, which[::-1])[::-1], expected))

        caching.load_weights(other_checkpoint)
        # One by one: of a batch, later prompts may hit what earlier ones have just computed.
        synced = [sample(caching, prompts, [i])[0] for i in (10, 11)]
        assert synced[0].num_cached_tokens == 0
        synced += sample(caching, prompts, which)
    assert not any(same(synced[2:], expected))
    with open_engine(other_checkpoint) as fresh:
        assert all(same(synced, sample(fresh, prompts, [10, 11]) + sample(fresh, prompts, which)))
