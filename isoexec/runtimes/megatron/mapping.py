"""Which Megatron parameter is made of which HF tensors, for every architecture.

Names are those of a text-only checkpoint with one tensor per expert matrix; :mod:`isoexec.runtimes.megatron.hf_files` reads and writes the
other forms. Megatron names carry the global layer and expert index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from isoexec.contract import ContractError

Tensor = torch.Tensor


class Sizes(NamedTuple):
    """What the layouts depend on.

    Attributes:
        heads, groups, head_size: query heads, key/value heads, channels of a head.
        layers: number of layers.
        tied: whether the output layer is the embedding.
        sparse: per layer whether its MLP is routed experts.
        experts: routed experts of a sparse layer.
        shared: whether a sparse layer has a shared expert without a gate.
        linear: per layer whether its mixer is Gated DeltaNet.
        keys, values: channels of all its keys (or queries), of all its values.
        value_heads: its value heads.
    """

    heads: int
    groups: int
    head_size: int
    layers: int
    tied: bool
    sparse: tuple[bool, ...] = ()
    experts: int = 0
    shared: bool = False
    linear: tuple[bool, ...] = ()
    keys: int = 0
    values: int = 0
    value_heads: int = 0


class Entry(NamedTuple):
    """One Megatron parameter.

    Attributes:
        name: Megatron name.
        hf: HF names it is made of.
        join: HF tensors -> whole parameter.
        split: whole parameter -> HF tensors.
        shard: (whole, rank, ranks) -> this rank's part.
        unshard: parts in rank order -> whole; None when every tensor-parallel rank that has the parameter has all of it.
        fp32: the op takes it in fp32, whatever the checkpoint stores.
        recast: a checkpoint may store it in another floating-point dtype, as long as no bit is lost.
    """

    name: str
    hf: tuple[str, ...]
    join: Callable[..., Tensor] = lambda w: w
    split: Callable[[Tensor], tuple[Tensor, ...]] = lambda w: (w,)
    shard: Callable[[Tensor, int, int], Tensor] = lambda w, rank, ranks: w
    unshard: Callable[[list[Tensor]], Tensor] | None = None
    fp32: bool = False
    recast: bool = False


def _replicated(name: str, hf: str, **flags) -> Entry:
    return Entry(name, (hf,), **flags)


def _sharded(name: str, hf: str, dim: int, **flags) -> Entry:
    return Entry(
        name, (hf,), shard=lambda w, rank, ranks: w.chunk(ranks, dim)[rank], unshard=lambda parts: torch.cat(parts, dim), **flags
    )


def _sectioned(name: str, hf: tuple[str, ...], rows: tuple[int, ...], sections: tuple[int, ...]) -> Entry:
    """HF tensors of ``rows`` rows, stacked; a shard holds its part of each of ``sections`` rows."""

    def shard(whole: Tensor, rank: int, ranks: int) -> Tensor:
        return torch.cat([section.chunk(ranks)[rank] for section in whole.split(sections)])

    def unshard(parts: list[Tensor]) -> Tensor:
        cut = [part.split([n // len(parts) for n in sections]) for part in parts]
        return torch.cat([part[i] for i in range(len(sections)) for part in cut])

    return Entry(name, hf, lambda *w: torch.cat(w), lambda whole: whole.split(rows), shard, unshard)


def _qkv(name: str, prefix: str, sizes: Sizes, gated: bool = False) -> Entry:
    """Rows grouped by key/value head: its query heads, their output gates if ``gated``, its key, its value; a shard holds whole groups.

    A gated ``q_proj`` holds, head by head, the query and its gate.
    """
    per_group, size = sizes.heads // sizes.groups, sizes.head_size
    kinds = 2 if gated else 1

    def join(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_head = q.view(sizes.groups, per_group, kinds, size, q.shape[-1])
        pair = [w.view(sizes.groups, 1, size, w.shape[-1]) for w in (k, v)]
        return torch.cat([*by_head.unbind(2), *pair], 1).flatten(0, 2)

    def split(whole: Tensor) -> tuple[Tensor, ...]:
        grouped = whole.view(sizes.groups, kinds * per_group + 2, size, whole.shape[-1])
        *by_kind, k, v = grouped.split([per_group] * kinds + [1, 1], 1)
        return torch.stack(by_kind, 2).flatten(0, 3), k.flatten(0, 2), v.flatten(0, 2)

    hf = tuple(f"{prefix}.{x}_proj.weight" for x in "qkv")
    return Entry(name, hf, join, split, lambda w, rank, ranks: w.chunk(ranks)[rank], torch.cat)


def _gate_up(name: str, prefix: str) -> Entry:
    """Gate rows, then up rows; a shard holds its gate rows, then its up rows."""

    def shard(whole: Tensor, rank: int, ranks: int) -> Tensor:
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])

    def unshard(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])

    return Entry(name, _gate_up_names(prefix), lambda gate, up: torch.cat([gate, up]), lambda w: w.chunk(2), shard, unshard)


def _gate_up_names(prefix: str) -> tuple[str, str]:
    return f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"


def _attention(ours: str, hf: str, sizes: Sizes, gated: bool = False) -> Iterator[Entry]:
    yield _qkv(f"{ours}.self_attention.linear_qkv.weight", f"{hf}.self_attn", sizes, gated)
    for x in "qk":
        yield _replicated(f"{ours}.self_attention.{x}_layernorm.weight", f"{hf}.self_attn.{x}_norm.weight")
    yield _sharded(f"{ours}.self_attention.linear_proj.weight", f"{hf}.self_attn.o_proj.weight", 1)


def _gated_delta_net(ours: str, hf: str, sizes: Sizes) -> Iterator[Entry]:
    ours, hf = f"{ours}.self_attention", f"{hf}.linear_attn"
    qkv = (sizes.keys, sizes.keys, sizes.values)
    rest = (sizes.values, sizes.value_heads, sizes.value_heads)
    projections = tuple(f"{hf}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
    yield _sectioned(f"{ours}.in_proj.weight", projections, (sum(qkv), *rest), (*qkv, *rest))
    yield _sectioned(f"{ours}.conv1d.weight", (f"{hf}.conv1d.weight",), (sum(qkv),), qkv)
    for name in ("A_log", "dt_bias"):
        yield _sharded(f"{ours}.{name}", f"{hf}.{name}", 0, fp32=True, recast=True)
    yield _replicated(f"{ours}.out_norm.weight", f"{hf}.norm.weight", recast=True)
    yield _sharded(f"{ours}.out_proj.weight", f"{hf}.out_proj.weight", 1)


def _mlp(ours: str, hf: str) -> Iterator[Entry]:
    yield _gate_up(f"{ours}.linear_fc1.weight", hf)
    yield _sharded(f"{ours}.linear_fc2.weight", f"{hf}.down_proj.weight", 1)


def _experts(ours: str, hf: str, sizes: Sizes) -> Iterator[Entry]:
    """Router and experts; the matrices of an expert are never cut."""
    yield _replicated(f"{ours}.mlp.router.weight", f"{hf}.mlp.gate.weight")
    for e in range(sizes.experts):
        expert, prefix = f"{ours}.mlp.experts.local_experts.{e}", f"{hf}.mlp.experts.{e}"
        yield Entry(
            f"{expert}.linear_fc1.weight", _gate_up_names(prefix), lambda gate, up: torch.cat([gate, up]), lambda w: w.chunk(2)
        )
        yield _replicated(f"{expert}.linear_fc2.weight", f"{prefix}.down_proj.weight")


def _qwen3_layer(i: int, ours: str, hf: str, sizes: Sizes) -> Iterator[Entry]:
    yield from _attention(ours, hf, sizes)
    yield from _experts(ours, hf, sizes) if sizes.sparse and sizes.sparse[i] else _mlp(f"{ours}.mlp", f"{hf}.mlp")


def _qwen3_5_layer(i: int, ours: str, hf: str, sizes: Sizes) -> Iterator[Entry]:
    yield from _gated_delta_net(ours, hf, sizes) if sizes.linear[i] else _attention(ours, hf, sizes, gated=True)
    if not (sizes.sparse and sizes.sparse[i]):
        yield from _mlp(f"{ours}.mlp", f"{hf}.mlp")
        return
    yield from _experts(ours, hf, sizes)
    yield from _mlp(f"{ours}.mlp.shared_experts", f"{hf}.mlp.shared_expert")
    yield _replicated(f"{ours}.mlp.shared_experts.gate_weight", f"{hf}.mlp.shared_expert_gate.weight")


def _latent_attention(ours: str, hf: str) -> Iterator[Entry]:
    """Rows of the up-projections lie head by head; a shard holds whole heads. The down-projections are whole on every rank."""
    ours, hf = f"{ours}.self_attention", f"{hf}.self_attn"
    yield _replicated(f"{ours}.linear_q_down_proj.weight", f"{hf}.q_a_proj.weight")
    yield _replicated(f"{ours}.q_layernorm.weight", f"{hf}.q_a_layernorm.weight")
    yield _sharded(f"{ours}.linear_q_up_proj.weight", f"{hf}.q_b_proj.weight", 0)
    yield _replicated(f"{ours}.linear_kv_down_proj.weight", f"{hf}.kv_a_proj_with_mqa.weight")
    yield _replicated(f"{ours}.kv_layernorm.weight", f"{hf}.kv_a_layernorm.weight")
    yield _sharded(f"{ours}.linear_kv_up_proj.weight", f"{hf}.kv_b_proj.weight", 0)
    yield _sharded(f"{ours}.linear_proj.weight", f"{hf}.o_proj.weight", 1)


def _glm4_moe_lite_layer(i: int, ours: str, hf: str, sizes: Sizes) -> Iterator[Entry]:
    yield from _latent_attention(ours, hf)
    if not sizes.sparse[i]:
        yield from _mlp(f"{ours}.mlp", f"{hf}.mlp")
        return
    yield from _experts(ours, hf, sizes)
    yield _replicated(f"{ours}.mlp.router.{EXPERT_BIAS}", f"{hf}.mlp.gate.e_score_correction_bias", fp32=True, recast=True)
    if sizes.shared:
        yield from _mlp(f"{ours}.mlp.shared_experts", f"{hf}.mlp.shared_experts")


def _model(layer: Callable[..., Iterator[Entry]], sizes: Sizes) -> Iterator[Entry]:
    yield _sharded("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0)
    for i in range(sizes.layers):
        ours, hf = f"decoder.layers.{i}", f"model.layers.{i}"
        yield _replicated(f"{ours}.input_layernorm.weight", f"{hf}.input_layernorm.weight")
        yield _replicated(f"{ours}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight")
        yield from layer(i, ours, hf, sizes)
    yield _replicated("decoder.final_layernorm.weight", "model.norm.weight")
    # A tied model holds it only on a last pipeline stage that lacks the embedding.
    yield _sharded("output_layer.weight", "model.embed_tokens.weight" if sizes.tied else "lm_head.weight", 0)


#: A buffer that is part of the policy as parameters are: it decides which experts a token takes.
EXPERT_BIAS = "expert_bias"

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")

#: HF architecture -> entries of layer i.
LAYERS: dict[str, Callable[..., Iterator[Entry]]] = {
    "Qwen3ForCausalLM": _qwen3_layer,
    "Qwen3MoeForCausalLM": _qwen3_layer,
    "Qwen3_5ForCausalLM": _qwen3_5_layer,
    "Qwen3_5ForConditionalGeneration": _qwen3_5_layer,
    "Qwen3_5MoeForCausalLM": _qwen3_5_layer,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5_layer,
    "Glm4MoeLiteForCausalLM": _glm4_moe_lite_layer,
}


def architecture_of(hf_config) -> str:
    """HF architecture of a transformers config.

    Raises:
        ContractError: one that has no mapping.
    """
    architecture = (hf_config.architectures or ["none"])[0]
    if architecture not in LAYERS:
        raise ContractError(f"checkpoint: expected one of {', '.join(LAYERS)}, found architecture {architecture}; add its mapping")
    return architecture


def sparse_layers(text) -> tuple[bool, ...]:
    """Per layer of an HF text config whether its MLP is routed experts.

    Raises:
        ContractError: the two ways in which a config says it disagree.
    """
    if not experts_of(text):
        return (False,) * text.num_hidden_layers
    kinds, dense_first = getattr(text, "mlp_layer_types", None), getattr(text, "first_k_dense_replace", None)
    if kinds:
        sparse = tuple(kind == "sparse" for kind in kinds)
        if dense_first is not None and sparse != tuple(i >= dense_first for i in range(len(sparse))):
            raise ContractError(
                f"mlp_layer_types: expected {dense_first} dense layers and then sparse ones, as first_k_dense_replace says and vLLM reads, "
                f"found {list(kinds)}; make the two entries of config.json agree"
            )
        return sparse
    step, dense = getattr(text, "decoder_sparse_step", 1), getattr(text, "mlp_only_layers", None) or ()
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(text.num_hidden_layers))


def experts_of(text) -> int:
    """Routed experts of a sparse layer of an HF text config; 0 where it has none."""
    return getattr(text, "num_experts", None) or getattr(text, "n_routed_experts", None) or 0


def linear_layers(text) -> tuple[bool, ...]:
    """Per layer of an HF text config whether its mixer is Gated DeltaNet."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return tuple(kind == "linear_attention" for kind in kinds)


def sizes_of(text) -> Sizes:
    """Sizes of an HF text config."""
    linear = {}
    if any(linear_layers(text)):
        linear = dict(
            linear=linear_layers(text),
            keys=text.linear_num_key_heads * text.linear_key_head_dim,
            values=text.linear_num_value_heads * text.linear_value_head_dim,
            value_heads=text.linear_num_value_heads,
        )
    return Sizes(
        heads=text.num_attention_heads,
        groups=text.num_key_value_heads,
        head_size=text.head_dim,
        layers=text.num_hidden_layers,
        tied=text.tie_word_embeddings,
        sparse=sparse_layers(text),
        experts=experts_of(text),
        shared=bool(getattr(text, "n_shared_experts", None)),
        **linear,
    )


def entries(hf_config) -> list[Entry]:
    """Mapping of an HF model.

    Args:
        hf_config: transformers config with ``architectures``.

    Raises:
        ContractError: unknown architecture.
    """
    return entries_for(architecture_of(hf_config), sizes_of(hf_config.get_text_config()))


def entries_for(architecture: str, sizes: Sizes) -> list[Entry]:
    """Mapping of ``architecture`` with given sizes."""
    return list(_model(LAYERS[architecture], sizes))
