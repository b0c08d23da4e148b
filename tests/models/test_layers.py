"""Our layers against HF's modules in fp32 (semantics, within bf16 noise), and against themselves (bits: layouts, prefill and decode)."""

import copy

import hf
import pytest
import torch

from isoexec.contract import Numerics
from isoexec.models import qwen3, qwen3_5, qwen3_5_moe, qwen3_moe
from isoexec.ops import attention, gdn, norm, rope
from isoexec.ops._core.bits import bit_equal, nudge
from tests.poison import adding_unwritten
from tests.ops.op_checks import same_bits

NUMERICS = Numerics(combine_groups=hf.GROUPS)
PLAN = gdn.Plan(list(hf.LENGTHS), NUMERICS.gdn_chunk)


@pytest.fixture(scope="module")
def models():
    return {"qwen3_moe": hf.qwen3_moe_model(), "qwen3_5": hf.qwen3_5_model(), "qwen3_5_moe": hf.qwen3_5_moe_model()}


def attend(q, k, v):
    return attention.varlen(q, k, v, hf.CU_SEQLENS, scale=q.shape[-1] ** -0.5, kv_block=NUMERICS.kv_block)


def ours(name, model, index, x, layer=None, **extra):
    """Output of one layer on the stream ``x``, residual added."""
    table = hf.rope_table(model)
    if name == "qwen3_moe":
        layer = layer or hf.qwen3_layer(model.layers[index])
        run = qwen3_moe.decoder_layer if isinstance(layer, qwen3_moe.Qwen3MoELayer) else qwen3.decoder_layer
        y, residual = run(x, None, layer, table, attend, NUMERICS, **extra)
    else:
        layer = layer or hf.qwen3_5_layer(model.layers[index])
        module = qwen3_5 if name == "qwen3_5" else qwen3_5_moe
        if isinstance(layer.mixer, qwen3_5.GatedAttention):
            y, residual = module.attention_layer(x, None, layer, table, attend, NUMERICS, **extra)
        else:
            y, residual = module.gdn_layer(x, None, layer, *hf.trainer_gdn(PLAN), NUMERICS, **extra)
    return norm.residual_add(y, residual)


def error(got, expected, x):
    """Median over tokens of the relative error of what the layer added to the stream. Median: bf16 noise may flip a router's near-tie."""
    added = expected - x.float()
    return ((got.float() - expected).norm(dim=-1) / added.norm(dim=-1)).median().item()


LAYERS = [(name, index) for name in ("qwen3_moe", "qwen3_5", "qwen3_5_moe") for index in (0, 1)]


@pytest.mark.parametrize("name, index", LAYERS)
def test_layer_is_that_of_hf(models, name, index):
    x = hf.stream()
    with torch.no_grad():
        expected = hf.run_layer(models[name], index, x)
        rounded = hf.run_layer(copy.deepcopy(models[name]).bfloat16(), index, x)
        got = ours(name, models[name], index, x)
    assert error(got, expected, x) < 1.1 * error(rounded, expected, x) < 0.011  # no further from fp32 than HF's own bf16
    assert error(got.roll(1, 0), expected, x) > 0.5  # the measure sees a fault


@pytest.mark.parametrize("name, index", LAYERS)
def test_gradients_are_those_of_hf(models, name, index):
    model, x = models[name], hf.stream()
    out = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    layer = (hf.qwen3_layer if name == "qwen3_moe" else hf.qwen3_5_layer)(model.layers[index])
    x_ours, x_hf = x.clone().requires_grad_(), x.float().requires_grad_()
    ours(name, model, index, x_ours, layer).backward(out.bfloat16())
    model.zero_grad()
    hf.run_layer(model, index, x_hf).backward(out.bfloat16().float())
    pairs = {"x": (x_ours.grad, x_hf.grad), **gradient_pairs(layer, model.layers[index])}
    for what, (got, expected) in pairs.items():
        expected = expected.reshape(got.shape)
        relative = (got.float() - expected).norm() / expected.norm()
        assert relative < 0.05 and expected.norm() > 0, f"{what}: {relative}"


def gradient_pairs(layer, hf_layer):
    pairs = {
        "input norm": (layer.input_norm.grad, hf_layer.input_layernorm.weight.grad),
        "post attention norm": (layer.post_attention_norm.grad, hf_layer.post_attention_layernorm.weight.grad),
    }
    if hasattr(hf_layer.mlp, "experts"):
        pairs["router"] = layer.mlp.router.grad, hf_layer.mlp.gate.weight.grad
        pairs["experts' down"] = layer.mlp.down.grad, hf_layer.mlp.experts.down_proj.grad
        pairs["experts' gate and up"] = layer.mlp.gate_up.grad, hf_layer.mlp.experts.gate_up_proj.grad
    if hasattr(hf_layer.mlp, "shared_expert"):
        pairs["shared gate"] = layer.shared.gate.grad, hf_layer.mlp.shared_expert_gate.weight.grad
        pairs["shared down"] = layer.shared.down.grad, hf_layer.mlp.shared_expert.down_proj.weight.grad
    if hasattr(hf_layer, "linear_attn"):
        m = hf_layer.linear_attn
        for what in ("A_log", "dt_bias"):
            pairs[what] = getattr(layer.mixer, what).grad, getattr(m, what).grad
        pairs["conv"] = layer.mixer.conv.grad, m.conv1d.weight.grad
        pairs["gated norm"] = layer.mixer.norm.grad, m.norm.weight.grad
        pairs["in_proj b, a"] = layer.mixer.in_proj[1].grad, torch.cat([m.in_proj_b.weight.grad, m.in_proj_a.weight.grad])
    return pairs


@pytest.mark.parametrize("name, index", LAYERS)
def test_packed_equals_separate(models, name, index):
    x = hf.stream()
    with torch.no_grad():
        whole = ours(name, models[name], index, x)
        first = x.clone()
        first[37:] = torch.randn(20, hf.D, generator=torch.Generator().manual_seed(5)).bfloat16()  # another neighbour
        same_bits(ours(name, models[name], index, first)[:37], whole[:37])
        first[0, 0] += 1
        assert not bit_equal(ours(name, models[name], index, first)[:37], whole[:37])


def test_memory_read_before_it_is_written_shows(models, monkeypatch):
    """Negative control of the poisoned memory in which every test of a model runs: times zero, and it is NaN."""
    monkeypatch.setattr(qwen3, "mlp_block", adding_unwritten(qwen3.mlp_block))
    with torch.no_grad():
        assert ours("qwen3_moe", models["qwen3_moe"], 0, hf.stream()).isnan().all()


@pytest.mark.parametrize("name, index", [("qwen3_moe", 1), ("qwen3_5_moe", 0)])
def test_what_on_route_returns_is_what_is_used(models, name, index):
    x, seen = hf.stream(), []

    def on_route(logits, weights, experts):
        seen.append((logits.shape, experts.shape))
        return weights

    with torch.no_grad():
        plain = ours(name, models[name], index, x)
        same_bits(ours(name, models[name], index, x, on_route=on_route), plain)
        moved = ours(name, models[name], index, x, on_route=lambda logits, weights, experts: weights * 2)
    assert seen == [((57, 16), (57, 4))] and not bit_equal(moved, plain)


def test_one_projection_weight_or_two(models):
    """vLLM holds qkvz and ba apart, Megatron one in_proj: a column of a product depends on its row of the weight alone."""
    layer = hf.qwen3_5_layer(models["qwen3_5"].layers[0])
    one = torch.cat(layer.mixer.in_proj)

    def split(y):
        qkv, z, b, a = y.split((256, 128, 4, 4), -1)
        return qkv, z.unflatten(-1, (4, 32)), b, a

    x = hf.stream()
    with torch.no_grad():
        two = ours("qwen3_5", models["qwen3_5"], 0, x, layer)
        merged = layer._replace(mixer=layer.mixer._replace(in_proj=(one,), split=split))
        same_bits(ours("qwen3_5", models["qwen3_5"], 0, x, merged), two)
        planted = layer._replace(mixer=layer.mixer._replace(in_proj=(nudge(one, one.abs().argmax()),), split=split))
        assert not bit_equal(ours("qwen3_5", models["qwen3_5"], 0, x, planted), two)


def test_rows_of_qkv_in_megatron_order(models):
    """Megatron groups rows by key head: q, gate, k, v of each."""
    layer = hf.qwen3_5_layer(models["qwen3_5"].layers[1])
    rows = torch.arange(768)
    q_gate, k, v = rows[:512].view(2, 2, 2, 64), rows[512:640].view(2, 64), rows[640:].view(2, 64)
    order = torch.cat([torch.cat([q_gate[g, :, 0].flatten(), q_gate[g, :, 1].flatten(), k[g], v[g]]) for g in range(2)])

    def split_qkv(y):
        q, gate, k, v = y.unflatten(-1, (2, 384)).split((128, 128, 64, 64), -1)
        return q.reshape(-1, 4, 64), gate.reshape(-1, 4, 64), k, v

    grouped = layer._replace(mixer=layer.mixer._replace(qkv=layer.mixer.qkv[order], split_qkv=split_qkv))
    x = hf.stream()
    with torch.no_grad():
        expected = ours("qwen3_5", models["qwen3_5"], 1, x, layer)
        same_bits(ours("qwen3_5", models["qwen3_5"], 1, x, grouped), expected)
        wrong = grouped._replace(mixer=grouped.mixer._replace(qkv=layer.mixer.qkv))
        assert not bit_equal(ours("qwen3_5", models["qwen3_5"], 1, x, wrong), expected)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("prompt", [1, 16, 20])
def test_gdn_prefill_and_decode_have_the_trainers_bits(models, name, prompt):
    """The first sequence again, as an engine runs it: a prompt, then a token at a time."""
    model, x = models[name], hf.stream()[:37]
    module = qwen3_5 if name == "qwen3_5" else qwen3_5_moe
    layer = hf.qwen3_5_layer(model.layers[0])
    pool = gdn.StatePool.empty(1, 2, 4, 32, 32, NUMERICS.gdn_chunk)
    window = torch.full((1, 3, 256), float("nan")).bfloat16()  # a dirty slot
    slots = torch.zeros(1, dtype=torch.int32)
    plan = gdn.Plan([prompt], NUMERICS.gdn_chunk)

    def prefill_convolve(qkv, weight):
        y, window[:] = gdn.conv1d(qkv, weight, plan)
        return y

    def prefill_mix(*qkvgb):
        return gdn.cpr_wy_prefill(*qkvgb, plan, pool, slots)

    with torch.no_grad():
        expected = ours(name, model, 0, hf.stream(), layer)[:37]
        pieces = [module.gdn_layer(x[:prompt], None, layer, prefill_convolve, prefill_mix, NUMERICS)]
        for t in range(prompt, 37):
            position = torch.tensor([t], dtype=torch.int32)
            pieces.append(
                module.gdn_layer(
                    x[t : t + 1], None, layer,
                    lambda qkv, weight: gdn.conv1d_step(qkv, weight, window, slots),
                    lambda *qkvgb, at=position: gdn.cpr_wy_decode(*qkvgb, pool, slots, at),
                    NUMERICS,
                )
            )  # fmt: skip
        got = torch.cat([norm.residual_add(y, residual) for y, residual in pieces])
    same_bits(got, expected)
    assert not bit_equal(nudge(got, -1), expected)


def test_interleaved_mrope_of_text_is_plain_rope(models):
    model = models["qwen3_5"]
    positions = torch.arange(400)
    three = positions.expand(3, 1, 400)  # temporal, height, width: equal for text
    cos_hf, sin_hf = model.rotary_emb(torch.empty(1, 1), three)
    cos, sin = rope.rope_table(positions, 16, 1e7)
    assert cos.shape == (400, 8) and cos_hf.shape == (1, 400, 16)
    for got, expected in ((cos, cos_hf[0]), (sin, sin_hf[0])):
        assert (torch.cat([got, got], -1) - expected).abs().max() < 1e-4  # HF rounds inverse frequencies in fp32: 400 * 2**-24
    apart = three.clone()
    apart[1] += 7
    assert (model.rotary_emb(torch.empty(1, 1), apart)[0] - cos_hf).abs().max() > 0.1


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_final_norm_is_zero_centred(models, name):
    model, x = models[name], hf.stream()
    with torch.no_grad():
        expected = model.norm(x.float())
        got = qwen3_5.final_norm(x, None, hf.bf16(model.norm.weight), model.config.rms_norm_eps)
        both = qwen3_5.final_norm(x, torch.zeros_like(x), hf.bf16(model.norm.weight), model.config.rms_norm_eps)
    assert ((got.float() - expected).abs() <= 2**-8 * expected.abs()).all()
    same_bits(both, got)
