"""Qwen3 MoE: a sequence's bits depend on its prompt, seed and the weights, whoever shares its experts."""

from __future__ import annotations

import pytest
import variants
from bitwise import same
from variants import sample

from isoexec.contract import ContractError
from isoexec.ops import moe
from isoexec.ops._core import registry

ARCHITECTURE = "Qwen3MoeForCausalLM"


def tied_checkpoint(folder, out):
    """The checkpoint with three experts, three and two whose rows of every router are equal."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensors[name][[0, 0, 0, 3, 3, 3, 6, 6]].clone()
    save_file(tensors, out / "tied.safetensors")
    return out / "tied.safetensors"


def recorded_routes(monkeypatch):
    """List that gets (logits, experts) of every call of the router."""
    route, seen = moe.route, []

    def record(logits, **options):
        weights, experts = route(logits, **options)
        seen.append((logits.clone(), experts.clone()))
        return weights, experts

    monkeypatch.setattr(moe, "route", record)
    return seen


def highest_first(monkeypatch):
    """Of equal logits the highest expert first: the router of the experts in reverse order. A row sum of 8 pairs the same terms."""
    route = moe.route

    def reverse(logits, **options):
        weights, experts = route(logits.flip(-1), **options)
        return weights, logits.shape[-1] - 1 - experts

    monkeypatch.setattr(moe, "route", reverse)


class TestOneEngine:
    def test_ops_of_both_cases(self, together):
        served = {(op, case) for op, case, _ in registry.served()}
        for op in ("moe.router_logits", "moe.route", "moe.dispatch", "moe.expert_mlp", "moe.combine"):
            assert {(op, "engine_prefill"), (op, "engine_decode")} <= served, op

    def test_alone_and_permuted(self, engine, prompts, together):
        variants.assert_alone_and_permuted(engine, prompts, together)

    def test_prefill_rescores_what_decode_sampled(self, engine, prompts, together):
        variants.assert_prefill_rescores(engine, prompts, together)

    def test_eviction_at_every_position(self, engine, prompts, together):
        variants.assert_evicted(engine, prompts, together)

    def test_negative_control_and_reload(self, engine, made, tmp_path, prompts, together):
        variants.assert_reload(engine, made(ARCHITECTURE)[0], tmp_path, prompts, together, "layers.3.mlp.gate.weight")

    def test_tied_experts(self, engine, made, tmp_path, prompts, together, monkeypatch):
        """Experts 0 to 2, 3 to 5 and 6 and 7 have equal logits, so every choice of four cuts through a tie: the lowest of them are taken,
        in prefill and decode, alone and batched. The same router with the highest taken gives other bits, and the same ones without ties.
        """
        highest_first(monkeypatch)
        assert all(same(sample(engine, prompts), together)), "without a tie the rule for ties moves no bit"
        monkeypatch.undo()
        engine.load_weights(tied_checkpoint(made(ARCHITECTURE)[0], tmp_path))
        routed = recorded_routes(monkeypatch)
        tied = sample(engine, prompts)
        assert len(routed) >= 4 * variants.TOKENS
        for logits, experts in routed:
            assert (logits[:, [0, 0, 3, 3, 6]] == logits[:, [1, 2, 4, 5, 7]]).all()
            expected = [sorted(range(8), key=lambda e: (-row[e], e))[:4] for row in logits.tolist()]
            assert experts.tolist() == expected
        monkeypatch.undo()
        variants.assert_alone_and_permuted(engine, prompts, tied)
        variants.assert_prefill_rescores(engine, prompts, tied)
        highest_first(monkeypatch)
        assert not any(same(sample(engine, prompts), tied))
        monkeypatch.undo()
        engine.load_weights(made(ARCHITECTURE)[0])
        assert all(same(sample(engine, prompts), together))

    def test_experts_are_as_loaded(self, engine, made):
        """What a weight sync writes to is what the ops read: no packing, no padding."""
        from safetensors.torch import load_file

        tensors = load_file(made(ARCHITECTURE)[0] / "model.safetensors")
        experts = engine._runner.get_model().model.layers[1].mlp.experts
        down = [n for n in tensors if ".layers.1." in n and "experts" in n and "down" in n]
        stored = tensors[down[0]] if len(down) == 1 else [tensors[f"model.layers.1.mlp.experts.{e}.down_proj.weight"] for e in range(8)]
        assert all((experts.w2_weight[e] == stored[e]).all() for e in range(8))


def test_chunked_prefill(opened, prompts, together):
    with opened(max_num_batched_tokens=33, max_num_seqs=8) as engine:
        assert all(same(sample(engine, prompts), together))


def test_preemption(opened, prompts):
    variants.assert_preemption(opened, prompts, kv_cache_tokens=256)


def test_prefix_cache(opened, prompts, together):
    with opened(enable_prefix_caching=True) as engine:
        variants.assert_prefix_cache(engine, prompts, together, at_least=500)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"enable_expert_parallel": True}, "parallel_config.enable_expert_parallel"),
        ({"moe_backend": "triton"}, "kernel_config.moe_backend"),
    ],
)
def test_refused_setting(opened, arguments, name):
    with pytest.raises(ContractError, match=f"{name}: expected"):
        with opened(**arguments):
            pass


def test_refused_groups(opened, made):
    with pytest.raises(ContractError, match="numerics.combine_groups: expected a divisor of the model's 8 experts, found 16"):
        with opened(contract=made(ARCHITECTURE, combine_groups=16)[1]):
            pass
