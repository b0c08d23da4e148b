"""Engines of two ranks, which share out heads, channels, vocabulary and whole experts, have the bits of an engine of one process."""

from __future__ import annotations

import dataclasses

import pytest
from variants import SEEDS, SOME, sample

from isoexec.contract import Claims, ExecutionContract
from isoexec.ops._core.bits import nudge
from isoexec.verify.protocol import WorkerGroup, to_bits
from isoexec.verify.run import worker_environment

RANKS, TOKENS = 2, 6
ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "Glm4MoeLiteForCausalLM")
#: Prompts are cut, prefixes are found, and sequences are many.
SHAPE = dict(max_num_seqs=64, max_num_batched_tokens=100, max_model_len=512, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The processes of the ranks, one engine after another."""
    pytest.importorskip("vllm")
    with WorkerGroup(tmp_path_factory.mktemp("logs")) as group:
        yield group.start_ranks(RANKS, "engine", "isoexec.verify.engine_worker", worker_environment(None))


def claimed(contract: str, folder) -> str:
    """A copy of the contract's file that claims the ranks."""
    whole = ExecutionContract.from_json(open(contract).read())
    path = folder / "contract.json"
    path.write_text(dataclasses.replace(whole, claims=Claims(engine_tp=RANKS, engine_ep=RANKS)).to_json())
    return str(path)


def sampled(ranks, prompts, **how) -> list[tuple]:
    asked = dict(prompts=[prompts[i] for i in SOME], seeds=[SEEDS[i] for i in SOME], temperature=1.0, max_tokens=TOKENS)
    answer = ranks.call("generate", 300, **asked, one_at_a_time=False, rows=True, **how)
    return [(r["tokens"], r["logprobs"], r["rows"]) for r in answer["rollouts"]]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ranks_have_the_bits_of_one_process(architecture, ranks, made, open_engine, prompts, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, contract = made(architecture)
    with open_engine(folder, contract=contract) as engine:
        expected = [(r.tokens, to_bits(r.logprobs), r.row_digests) for r in sample(engine, prompts)]
        manifest = engine.weight_manifest().data()
    ranks.call("open", 300, model=str(folder), contract=claimed(contract, tmp_path), shape=SHAPE)
    assert sampled(ranks, prompts) == expected
    assert sampled(ranks, prompts) == expected, "from the prefix cache"
    assert sampled(ranks, prompts, evict_at=[3, 5]) == expected
    assert ranks.call("weights", 300) == manifest

    tensors = load_file(folder / "model.safetensors")
    [name] = [n for n in tensors if n.endswith("layers.1.post_attention_layernorm.weight")]
    tensors[name] = nudge(tensors[name], index=int(tensors[name].abs().argmax()))
    save_file(tensors, tmp_path / "nudged.safetensors")
    ranks.call("sync", 300, weights=str(tmp_path / "nudged.safetensors"))
    assert not any(a == b for a, b in zip(sampled(ranks, prompts)[4:], expected[4:])), "one ulp of one weight"
    assert ranks.call("weights", 300) != manifest
    ranks.call("sync", 300, weights=str(folder))
    assert sampled(ranks, prompts) == expected and ranks.call("weights", 300) == manifest
