"""GLM-4.7-Flash's layers against HF's modules in fp32 (semantics), and against themselves (bits: packing, prefill and decode)."""

import copy

import hf
import pytest
import torch

from isoexec.contract import Numerics
from isoexec.models import glm4_moe_lite
from isoexec.ops import attention, norm, rope
from isoexec.ops._core.bits import bit_equal, nudge
from tests.ops.op_checks import same_bits

NUMERICS = Numerics(combine_groups=hf.GROUPS, row_leaves=4)
#: Sizes in which values are narrower than queries and keys, as wide, and experts lie in groups.
VARIANTS = {
    "wide": dict(v_head_dim=32),
    "narrow": dict(v_head_dim=16),
    "groups": dict(v_head_dim=32, n_group=4, topk_group=2),
}


@pytest.fixture(scope="module")
def models():
    return {name: hf.glm4_moe_lite_model(**changes) for name, changes in VARIANTS.items()}


def attend(q, k, v, cu_seqlens=hf.CU_SEQLENS):
    return attention.varlen(q, k, v, cu_seqlens, scale=q.shape[-1] ** -0.5, kv_block=NUMERICS.kv_block)


def table(positions=hf.POSITIONS, model=None):
    return rope.rope_table(positions, 8, 10000.0 if model is None else model.config.rope_parameters["rope_theta"])


def ours(model, index, x, layer=None, **extra):
    """Output of one layer on the stream ``x``, residual added."""
    layer = layer or hf.glm4_moe_lite_layer(model.layers[index])
    return norm.residual_add(*glm4_moe_lite.decoder_layer(x, None, layer, table(model=model), attend, NUMERICS, **extra))


def error(got, expected, x):
    """Median over tokens of the relative error of what the layer added; bf16 noise may flip a router's near-tie."""
    return ((got.float() - expected).norm(dim=-1) / (expected - x.float()).norm(dim=-1)).median().item()


CASES = [("wide", 0), ("wide", 1), ("narrow", 1), ("groups", 1)]


@pytest.mark.parametrize("name, index", CASES)
def test_layer_is_that_of_hf(models, name, index):
    model, x = models[name], hf.stream()
    with torch.no_grad():
        expected = hf.run_layer(model, index, x)
        rounded = copy.deepcopy(model).bfloat16()
        for layer, exact in zip(rounded.layers[1:], model.layers[1:]):
            layer.mlp.gate.e_score_correction_bias = exact.mlp.gate.e_score_correction_bias
        rounded = hf.run_layer(rounded, index, x)
        got = ours(model, index, x)
    assert error(got, expected, x) < 1.1 * error(rounded, expected, x) < 0.011
    assert error(got.roll(1, 0), expected, x) > 0.5  # the measure sees a fault


@pytest.mark.parametrize("change", ["bias", "scale", "halves", "shared"])
def test_the_measure_sees_each_part(models, change, monkeypatch):
    model, x = models["wide"], hf.stream()
    layer = hf.glm4_moe_lite_layer(model.layers[1])
    if change == "bias":
        layer = layer._replace(mlp=layer.mlp._replace(expert_bias=layer.mlp.expert_bias.flip(0)))
    elif change == "scale":
        layer = layer._replace(mlp=layer.mlp._replace(scale=1.0))
    elif change == "shared":
        layer = layer._replace(shared=None)
    else:
        rotate = rope.apply_rope
        monkeypatch.setattr(rope, "apply_rope", lambda x, cos, sin, interleaved: rotate(x, cos, sin))
    with torch.no_grad():
        assert error(ours(model, 1, x, layer), hf.run_layer(model, 1, x), x) > 0.02


@pytest.mark.parametrize("index", [0, 1])
def test_gradients_are_those_of_hf(models, index):
    model, x = models["narrow"], hf.stream()
    out = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    layer, hf_layer = hf.glm4_moe_lite_layer(model.layers[index]), model.layers[index]
    x_ours, x_hf = x.clone().requires_grad_(), x.float().requires_grad_()
    ours(model, index, x_ours, layer).backward(out.bfloat16())
    model.zero_grad()
    hf.run_layer(model, index, x_hf).backward(out.bfloat16().float())
    a, b, m = layer.attention, hf_layer.self_attn, hf_layer.mlp
    pairs = {
        "x": (x_ours, x_hf), "input norm": (layer.input_norm, hf_layer.input_layernorm.weight), "q_a": (a.q_a, b.q_a_proj.weight),
        "q_a norm": (a.q_a_norm, b.q_a_layernorm.weight), "q_b": (a.q_b, b.q_b_proj.weight), "o": (a.o, b.o_proj.weight),
        "kv_a": (a.kv_a, b.kv_a_proj_with_mqa.weight), "kv_a norm": (a.kv_a_norm, b.kv_a_layernorm.weight),
        "kv_b": (a.kv_b, b.kv_b_proj.weight),
    }  # fmt: skip
    if index:
        pairs |= {"router": (layer.mlp.router, m.gate.weight), "experts' down": (layer.mlp.down, m.experts.down_proj)}
        pairs["shared down"] = layer.shared.down, m.shared_experts.down_proj.weight
    else:
        pairs["down"] = layer.mlp.down, m.down_proj.weight
    for what, (got, expected) in pairs.items():
        expected = expected.grad.reshape(got.shape)
        relative = (got.grad.float() - expected).norm() / expected.norm()
        assert relative < 0.05 and expected.norm() > 0, f"{what}: {relative}"


@pytest.mark.parametrize("name, index", CASES)
def test_packed_equals_separate(models, name, index):
    x = hf.stream()
    with torch.no_grad():
        whole = ours(models[name], index, x)
        other = x.clone()
        other[37:] = torch.randn(20, hf.D, generator=torch.Generator().manual_seed(5)).bfloat16()
        same_bits(ours(models[name], index, other)[:37], whole[:37])
        other[0, 0] += 1
        assert not bit_equal(ours(models[name], index, other)[:37], whole[:37])


@pytest.mark.parametrize("prompt", [1, 16, 36])
@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_prefill_and_decode_have_the_trainers_bits(models, name, prompt):
    """The first sequence again, as an engine runs it: a prompt, then a token at a time against a dirty paged cache."""
    model, x = models[name], hf.stream()[:37]
    layer = hf.glm4_moe_lite_layer(model.layers[1])
    cache = [torch.full((5, 16, 4, 32), float("nan")).bfloat16() for _ in "kv"]
    pages = torch.tensor([[3, 1, 4]], dtype=torch.int32)

    def cached(start, stop):
        def attend(q, k, v):
            at = torch.arange(start, stop)
            attention.write_cache(k, v, *cache, pages[0, at // 16].long() * 16 + at % 16)
            bounds = [torch.tensor(n, dtype=torch.int32) for n in ([stop], [0, stop - start])]
            return attention.paged(q, *cache, pages, *bounds, scale=32**-0.5, kv_block=NUMERICS.kv_block)

        return attend

    with torch.no_grad():
        expected = ours(model, 1, hf.stream(), layer)[:37]
        cuts = [0, prompt, *range(prompt + 1, 38)]
        pieces = [
            glm4_moe_lite.decoder_layer(x[a:b], None, layer, table(torch.arange(a, b), model), cached(a, b), NUMERICS)
            for a, b in zip(cuts, cuts[1:])
        ]
        got = torch.cat([norm.residual_add(y, residual) for y, residual in pieces])
    same_bits(got, expected)
    assert not bit_equal(nudge(got, -1), expected)


def test_padded_values_have_the_bits_of_their_channels(models):
    """A head's zero channels are cut off after attention, and move none of the others."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(57, 4, 32, generator=g).bfloat16() for _ in "qkv")
    narrow = glm4_moe_lite.padded(v[..., :16], 32)
    same_bits(attend(q, k, narrow)[..., :16], attend(q, k, v)[..., :16])
    assert not attend(q, k, narrow)[..., 16:].any()
    assert glm4_moe_lite.padded(v, 32) is v


def test_other_weights_move_every_token(models):
    model, x = models["wide"], hf.stream()
    layer = hf.glm4_moe_lite_layer(model.layers[1])
    with torch.no_grad():
        before = ours(model, 1, x, layer)
        moved = layer._replace(attention=layer.attention._replace(kv_a=nudge(layer.attention.kv_a, 5, 64)))
        assert not bit_equal(ours(model, 1, x, moved), before)
