"""Faults in latent attention: the model is GLM-4.7-Flash with four layers, of which the first is dense. As :mod:`faults`."""

from __future__ import annotations

from planting import Fault, any_token, scaled, served_by, stale, swapped, ulp

LATENT = 64  # width of the keys' and values' latent in the made checkpoint


def moved_latent(original, x, weight, *args):
    """One ulp in one element of each token's normed latent."""
    import torch

    out = original(x, weight, *args)
    if len(weight) == LATENT:
        out = out.clone()
        out.view(torch.int16)[:, 5] += 1
    return out


def by_halves(original, x, cos, sin, **kwargs):
    """Channels i and i + R / 2 turn together, not neighbours."""
    return original(x, cos, sin, interleaved=False)


def module(name, function):
    """A function of the model's in place of another, for one side's whole process."""

    def plant(plant, parts):
        from isoexec.models import glm4_moe_lite

        plant.attribute(glm4_moe_lite, name, function)

    return plant


def without_latent_norm(x, a, rope_table, attend, numerics, tp=None):
    from isoexec.models import glm4_moe_lite as glm
    from isoexec.ops import collective, matmul, norm

    q = norm.rms_norm(matmul.linear(x, a.q_a), a.q_a_norm, a.eps)
    kv, k_rope = matmul.linear(x, a.kv_a).split((LATENT, a.rope_dim), -1)
    q, kv, k_rope = (collective.column_parallel_input(part, tp=tp) for part in (q, kv, k_rope))
    q = matmul.linear(q, a.q_b).unflatten(-1, (-1, a.nope_dim + a.rope_dim))
    k, v = matmul.linear(kv, a.kv_b).unflatten(-1, (-1, a.nope_dim + a.value_dim)).split((a.nope_dim, a.value_dim), -1)
    q, k = glm.rotate(q, k, k_rope, rope_table)
    out = attend(q, k, glm.padded(v, q.shape[-1]))
    return matmul.row_parallel_linear(out[..., : a.value_dim].flatten(1), a.o, leaves=numerics.row_leaves, tp=tp)


def padded_with_ones(v, size):
    import torch

    return torch.cat([v, v.new_ones(*v.shape[:-1], size - v.shape[-1])], -1)


FAULTS = {
    "one ulp in the projection to the latent": Fault(
        "trainer", "weights", 1, "matmul.linear", ulp(lambda p: p.layers[1].self_attention.linear_kv_down_proj.weight), "weight", any_token
    ),
    "one ulp in a latent norm": Fault(
        "trainer", "weights", 2, "norm.rms_norm", ulp(lambda p: p.layers[2].self_attention.kv_layernorm.weight), "weight", any_token
    ),
    "a stale projection from the latent": Fault(
        "engine", "weights", 2, "matmul.linear", stale(lambda p: p.layers[2].self_attn.kv_b_proj.weight), "weight"
    ),
    "swapped biases of the router": Fault(
        "trainer", "weights", 1, "moe.route", swapped(lambda p: [p.layers[1].mlp.router.expert_bias], 2, 5), "expert_bias", any_token
    ),
    "one ulp of a latent": Fault("trainer", "op", 1, "norm.rms_norm", served_by("norm.rms_norm", moved_latent, 1)),
    "a rotation by halves": Fault("trainer", "op", 2, "rope.apply_rope", served_by("rope.apply_rope", by_halves, 2), token=any_token),
    "another attention scale, of a latent model": Fault(
        "trainer", "op", 3, "attention", served_by("attention.varlen", scaled("scale", 1.01), 3), token=any_token
    ),
    "values that are not padded with zeros": Fault("engine", "structure", 0, "attention", module("padded", padded_with_ones), "outside"),
    "no latent norm": Fault(
        "trainer", "structure", 0, "norm.rms_norm", module("attention_block", without_latent_norm), "the engine runs more"
    ),
}
