"""Ways of running the same sequences that must not show in a bit, for the architectures beside the dense one."""

from __future__ import annotations

import struct

from bitwise import same

from isoexec.ops._core.bits import nudge

TOKENS = 6
SEEDS = list(range(1000, 1064))
#: Of the fixture ``prompts``: lengths on both sides of chunks and blocks, the first of one token, three with a shared prefix.
SOME = [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 20, 21]


def sample(engine, prompts, which=SOME, tokens=TOKENS, evict_at=(), temperature=1.0):
    asked = [prompts[i] for i in which], [SEEDS[i] for i in which]
    return engine.generate(*asked, temperature, tokens, record_rows=True, evict_at=evict_at)


def assert_alone_and_permuted(engine, prompts, expected):
    for n in (0, 3, 9):
        assert same(sample(engine, prompts, [SOME[n]]), [expected[n]]) == [True], SOME[n]
    order = [(5 * n + 3) % len(SOME) for n in range(len(SOME))]
    assert all(same(sample(engine, prompts, [SOME[n] for n in order]), [expected[n] for n in order]))
    assert all(same(sample(engine, prompts, SOME[4:9]), expected[4:9]))


def assert_prefill_rescores(engine, prompts, expected):
    """Prompt logprobs of prompt + tokens, computed in one prefill, are the logprobs that decode sampled."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=1.0, seed=0, prompt_logprobs=0, detokenize=False)
    outputs = engine.request([prompts[i] + r.tokens for i, r in zip(SOME, expected)], [params] * len(SOME))
    for i, output, rollout in zip(SOME, outputs, expected, strict=True):
        rescored = [output.prompt_logprobs[len(prompts[i]) + n][token].logprob for n, token in enumerate(rollout.tokens)]
        assert [struct.pack("<f", x) for x in rescored] == [struct.pack("<f", x) for x in rollout.logprobs], i


def assert_reload(engine, checkpoint, tmp_path, prompts, expected, weight):
    """One ulp of the largest element of ``weight`` turns every comparison red; the old weights turn it green again."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    [name] = [n for n in tensors if n.endswith(weight)]
    tensors[name] = nudge(tensors[name], index=int(tensors[name].abs().argmax()))
    save_file(tensors, tmp_path / "nudged.safetensors")
    engine.load_weights(tmp_path / "nudged.safetensors")
    assert not any(same(sample(engine, prompts), expected)[4:])  # of a prompt of one or two tokens, a rounding may hide it
    engine.load_weights(checkpoint)
    assert all(same(sample(engine, prompts), expected))


def assert_prefix_cache(engine, prompts, expected, at_least):
    """Cold, warm and in another order."""
    assert all(same(sample(engine, prompts), expected))
    warm = sample(engine, prompts)
    assert sum(r.num_cached_tokens for r in warm) >= at_least
    assert all(same(warm, expected))
    assert all(same(sample(engine, prompts, SOME[::-1])[::-1], expected))


def assert_preemption(opened, prompts, **tight):
    """Sequences that grow until the cache is full are evicted and recomputed."""
    which = [2, 3, 4, 5, 14, 15, 16, 26]
    with opened() as engine:
        expected = sample(engine, prompts, which, tokens=40)
        assert engine.num_preemptions == 0
    with opened(max_model_len=128, **tight) as engine:
        evicted = sample(engine, prompts, which, tokens=40)
        assert engine.num_preemptions > 0
    assert all(same(evicted, expected))


def assert_evicted(engine, prompts, expected, positions=range(1, TOKENS)):
    """Evicted after some tokens, all at once, sequences are recomputed and go on in the same bits; prompts end on both sides of chunks."""
    for position in positions:
        before = engine.num_preemptions
        assert all(same(sample(engine, prompts, evict_at=(position,)), expected)), position
        assert engine.num_preemptions - before >= len(SOME) // 2
