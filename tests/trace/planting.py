"""How each fault of :mod:`faults` is planted in a running engine or trainer. Only the workers import torch: functions do when they run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault and what a trace has to say.

    Attributes:
        side: that it is planted in.
        kind: class of the cause.
        layer, stage: of the first difference (stage: the beginning of its name, or the stage that is missing or extra).
        plant: (plant, parts of the side) -> None.
        said: a word of the explanation.
        token: whether (sequence, position, prompt length, tokens) may be the first token that differs; None: the very first one.
        score: arguments of the trainer's pass that are part of the fault.
        differs: whether a planted value must show as an element.
    """

    side: str
    kind: str
    layer: int
    stage: str
    plant: Callable = lambda plant, parts: None
    said: str = ""
    token: Callable | None = None
    score: dict = dataclasses.field(default_factory=dict)


@dataclass
class EngineParts:
    engine: object
    model: object

    @property
    def layers(self):
        return self.model.model.layers


@dataclass
class TrainerParts:
    trainer: object

    @property
    def gpt(self):
        return self.trainer.gpt

    @property
    def layers(self):
        return self.trainer.gpt.decoder.layers


def first_token(sequence, position, prompt, tokens):
    return (sequence, position) == (0, 0)


def any_token(sequence, position, prompt, tokens):
    return True


def generated(sequence, position, prompt, tokens):
    """A token that the engine decoded."""
    return position >= prompt


# --- weights ------------------------------------------------------------------------------------------------------------------


def ulp(weight_of, at=None):
    """Move the largest element of a weight, or of a row of it, by one ulp."""

    def plant(plant, parts):
        import torch

        weight = weight_of(parts)

        def change(data):
            flat = data if at is None else data[at]
            index = int(flat.abs().argmax())
            flat.view(torch.int16 if data.element_size() == 2 else torch.int32).view(-1)[index] += 1

        plant.values(weight, change)

    return plant


def rounded(weight_of):
    return lambda plant, parts: plant.values(weight_of(parts), lambda data: data.copy_(data.bfloat16().float()))


def swapped(weights_of, a, b):
    """Exchange entries ``a`` and ``b`` of each weight, by the first dimension or the list."""

    def plant(plant, parts):
        for weight in weights_of(parts):
            if isinstance(weight, list):
                first, second = weight[a].data.clone(), weight[b].data.clone()
                plant.values(weight[a], lambda data, new=second: data.copy_(new))
                plant.values(weight[b], lambda data, new=first: data.copy_(new))
            else:

                def change(data):
                    data[[a, b]] = data[[b, a]].clone()

                plant.values(weight, change)

    return plant


def halves(weight_of):
    def change(data):
        half = data.shape[0] // 2
        data.copy_(data.roll(half, 0))

    return lambda plant, parts: plant.values(weight_of(parts), change)


def stale(weight_of):
    """What the weight was before a step: a little off everywhere."""
    return lambda plant, parts: plant.values(weight_of(parts), lambda data: data.mul_(1.0078125))


def experts_of(layer):
    return lambda parts: [list(group) for group in layer(parts).mlp.experts()]


# --- positions and states -----------------------------------------------------------------------------------------------------


def shifted_rope(plant, parts):
    """The engine's rope is one position ahead from position 5 on."""
    from isoexec.runtimes.vllm import qwen3_5

    forward = qwen3_5.forward

    def shifted(model, contract, input_ids, positions, inputs_embeds=None):
        return forward(model, contract, input_ids, positions + (positions >= 5), inputs_embeds)

    plant.attribute(qwen3_5, "forward", shifted)


def fused_sequences(layer):
    """A layer takes the first two sequences of the pack for one."""

    def plant(plant, parts):
        def fuse(module, args, kwargs):
            packed = kwargs["packed_seq_params"]
            bounds = packed.cu_seqlens_q
            if len(bounds) < 3:
                return args, kwargs
            import torch

            fused = torch.cat([bounds[:1], bounds[2:]])
            return args, kwargs | {"packed_seq_params": dataclasses.replace(packed, cu_seqlens_q=fused, cu_seqlens_kv=fused)}

        plant.hook(parts.layers[layer].register_forward_pre_hook(fuse, with_kwargs=True))

    return plant


def built_with(builder_of, change):
    """Metadata of a layer kind, changed as it is built."""

    def plant(plant, parts):
        builder = builder_of()
        build = builder.build
        plant.attribute(builder, "build", lambda self, *args, **kwargs: change(build(self, *args, **kwargs)))

    return plant


def gdn_builder():
    from isoexec.runtimes.vllm.gdn import MetadataBuilder

    return MetadataBuilder


def attention_builder():
    from isoexec.runtimes.vllm.attention import MetadataBuilder

    return MetadataBuilder


def late_positions(metadata):
    return dataclasses.replace(metadata, positions=metadata.positions - 1) if metadata.decode else metadata


def short_context(metadata):
    """The newest token is masked away where there is an older one."""
    if metadata.max_query_len > 1:
        return metadata
    return dataclasses.replace(metadata, seq_lens=metadata.seq_lens - (metadata.seq_lens > 1).int())


def spoiled_state(layer, before, spoil):
    """``spoil(layer's pool fields, slots)`` before the op ``before`` runs in a decode step of ``layer``."""

    def plant(plant, parts):
        from vllm.forward_context import get_forward_context

        def first(original, *args, **kwargs):
            metadata = get_forward_context().attn_metadata
            attention = parts.layers[layer].linear_attn
            found = metadata[attention.prefix]
            if found.decode:
                spoil(attention.kv_cache, found.slots.long())
            return original(*args, **kwargs)

        plant.op(before, first, layer=layer)

    return plant


def dirty(kv_cache, slots):
    """The slot still holds what another sequence left in it."""
    windows, high, low, k, rhs, gates, *_ = kv_cache
    high[slots] = high[slots].roll(1, -1)
    k[slots] = k[slots].roll(1, -1)
    rhs[slots] = rhs[slots].roll(1, -1)


def in_bf16(kv_cache, slots):
    kv_cache[2][slots] = 0  # the low plane


def dirty_window(kv_cache, slots):
    kv_cache[0][slots] = kv_cache[0][slots].roll(1, -1)


def spoiled_cache(plant, parts):
    """A key of position 0 changes in the cache between two steps."""
    from vllm.forward_context import get_forward_context

    def first(original, *args, **kwargs):
        attention = parts.layers[3].self_attn.attn
        metadata = get_forward_context().attn_metadata[attention.layer_name]
        if metadata.max_query_len == 1:
            pages = metadata.block_table[:, 0].long()
            attention.kv_cache[pages, 0, 0] = attention.kv_cache[pages, 0, 0].roll(1, -1)
        return original(*args, **kwargs)

    plant.op("rope.apply_rope", first, layer=3)


def coarse_values(original, k, v, *args, **kwargs):
    """Values go through eight bits on their way into the cache."""
    import torch

    return original(k, v.to(torch.float8_e4m3fn).to(v.dtype), *args, **kwargs)


# --- ops ----------------------------------------------------------------------------------------------------------------------


def served_by(op, function, layer=None):
    return lambda plant, parts: plant.op(op, function, layer=layer)


def other_numerics(layer, **changes):
    def plant(plant, parts):
        module = parts.layers[layer]
        plant.attribute(module, "numerics", dataclasses.replace(module.numerics, **changes))

    return plant


def rounded_silu(original, gate_up):
    """Two roundings: of the silu, and of the product."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * gate.sigmoid()).to(gate_up.dtype) * up.to(gate_up.dtype)


def unrounded_residual(original, x, residual, weight, eps):
    total = x.float() + residual.float()
    scale = (total.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (total * scale * (1 + weight.float())).to(x.dtype), total.to(x.dtype)


def bf16_table(original, *args):
    return tuple(part.bfloat16().float() for part in original(*args))


def sees_the_next(original, q, k, v, *args, **kwargs):
    """A row's mask ends one token late: it is computed as the row after it."""
    out = original(q.roll(1, 0), k, v, *args, **kwargs)
    own = original(q, k, v, *args, **kwargs)
    bounds = kwargs["cu_seqlens"].long()
    late = out.roll(-1, 0)
    late[bounds[1:] - 1] = own[bounds[1:] - 1]
    return late


def flipped_ties(original, logits, **kwargs):
    """Of equal scores the higher index first."""
    weights, experts = original(logits, **kwargs)
    experts = experts.clone()
    for rank in range(experts.shape[1] - 1):
        pair = experts[:, rank : rank + 2]
        tied = (weights[:, rank] == weights[:, rank + 1]) & (pair[:, 0] < pair[:, 1])
        pair[tied] = pair[tied].flip(-1)
    return weights, experts


def rounded_combine(original, values, weights, experts, shared=None, *, num_experts, combine_groups, **kwargs):
    """Experts in rank order, each sum rounded to bf16."""
    total = values[:, 0] * 0
    for rank in range(values.shape[1]):
        total = (total.float() + values[:, rank].float() * weights[:, rank, None]).to(values.dtype)
    return total + shared


def rounded_logits(original, *args):
    return original(*args).bfloat16().float()


def reciprocal(original, logits, temperature):
    return logits * (1 / temperature).reshape(-1, 1)


def library_logprob(original, logits, tokens, **kwargs):
    return logits.double().log_softmax(-1).float().gather(1, tokens[:, None])[:, 0]


def padded_row(original, logits, tokens, *, vocab_size, **kwargs):
    """An entry beyond the vocabulary enters the sum."""
    import torch

    wide = torch.cat([logits, logits.new_zeros(len(logits), 1)], 1)
    return original(wide, tokens, vocab_size=vocab_size + 1, **kwargs)


def not_a_number(original, x, *args, **kwargs):
    out = original(x, *args, **kwargs).clone()
    out[0, 0, 0] = float("nan")
    return out


def bf16_decay(original, q, k, v, g, *args, **kwargs):
    return original(q, k, v, g.bfloat16().float(), *args, **kwargs)


def lost_sign(original, x, gate, *args):
    """Zero loses its sign: the first element is -0.0 in one and 0.0 in the other."""
    out = original(x, gate, *args).clone()
    out.view(out.shape[0], -1)[:, 0] *= -1
    return out


def reversed_taps(original, x, weight, *args, **kwargs):
    return original(x, weight.flip(-1), *args, **kwargs)


def scaled(name, factor):
    def run(original, *args, **kwargs):
        return original(*args, **kwargs | {name: kwargs[name] * factor})

    return run


# --- structure ----------------------------------------------------------------------------------------------------------------


def without_final_norm(plant, parts):
    import torch

    plant.attribute(parts.gpt.decoder, "final_layernorm", torch.nn.Identity())


def computed_with(layer, change):
    """``change(compute, x, ...)`` in place of a trainer layer's ``compute``."""

    def plant(plant, parts):
        module = parts.layers[layer]
        compute = module.compute
        plant.attribute(module, "compute", lambda x, *args: change(compute, x, *args))

    return plant


def extra_op(compute, x, *args):
    from isoexec.ops import activation

    activation.sigmoid_gate(x, x)
    return compute(x, *args)


def stray_multiply(compute, x, *args):
    return compute(x * 1.0078125, *args)


def skipped(layer):
    return lambda plant, parts: plant.attribute(
        parts.layers[layer], "forward", lambda hidden_states, *args, **kwargs: (hidden_states, None)
    )


def without_shared(plant, parts):
    from isoexec.models import qwen3_5_moe, qwen3_moe

    def moe_block(x, layer, numerics, tp=None, ep=None, on_route=None):
        return qwen3_moe.sparse_mlp_block(x, layer.mlp, numerics, ep=ep, on_route=on_route)

    plant.attribute(qwen3_5_moe, "moe_block", moe_block)


def without_gate(plant, parts):
    from isoexec.models import qwen3_5
    from isoexec.ops import matmul, norm, rope

    def attention_block(x, mixer, rope_table, attend, numerics, tp=None):
        q, gate, k, v = mixer.split_qkv(matmul.linear(x, mixer.qkv))
        q = rope.apply_rope(norm.zero_centered_rms_norm(q, mixer.q_norm, mixer.eps), *rope_table)
        k = rope.apply_rope(norm.zero_centered_rms_norm(k, mixer.k_norm, mixer.eps), *rope_table)
        return matmul.row_parallel_linear(attend(q, k, v).flatten(1), mixer.o, leaves=numerics.row_leaves, tp=tp)

    plant.attribute(qwen3_5, "attention_block", attention_block)


def trainer_layer(index):
    return lambda parts: parts.layers[index]
