"""HF checkpoints and Megatron parameters: names, shapes and layouts both ways, bit for bit.

A mapping entry is one Megatron parameter and the HF tensors it is made of. Loading cuts this rank's shard; exporting gathers the
shards. Nothing is cast: a tensor of another dtype than the parameter's is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from isoexec.contract import ContractError

Tensor = torch.Tensor


class Sizes(NamedTuple):
    """What the layouts depend on: query and key/value heads, head size, layers, whether the output layer is the embedding."""

    heads: int
    groups: int
    head_size: int
    layers: int
    tied: bool


class Entry(NamedTuple):
    """One Megatron parameter.

    Attributes:
        name: Megatron name, with the global layer index.
        hf: HF names it is made of.
        join: HF tensors -> whole parameter.
        split: whole parameter -> HF tensors.
        shard: (whole, rank, ranks) -> this rank's part.
        unshard: parts in rank order -> whole.
    """

    name: str
    hf: tuple[str, ...]
    join: Callable[..., Tensor]
    split: Callable[[Tensor], tuple[Tensor, ...]]
    shard: Callable[[Tensor, int, int], Tensor]
    unshard: Callable[[list[Tensor]], Tensor]


def _replicated(name: str, hf: str) -> Entry:
    return Entry(name, (hf,), lambda w: w, lambda w: (w,), lambda w, rank, ranks: w, lambda parts: parts[0])


def _sharded(name: str, hf: str, dim: int) -> Entry:
    return Entry(
        name, (hf,), lambda w: w, lambda w: (w,), lambda w, rank, ranks: w.chunk(ranks, dim)[rank], lambda parts: torch.cat(parts, dim)
    )


def _qkv(name: str, prefix: str, sizes: Sizes) -> Entry:
    """Rows grouped by key/value head: its query heads, its key, its value; a shard holds whole groups."""
    per_group, size = sizes.heads // sizes.groups, sizes.head_size

    def join(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [w.view(sizes.groups, -1, size, w.shape[-1]) for w in (q, k, v)]
        return torch.cat(parts, 1).flatten(0, 2)

    def split(whole: Tensor) -> tuple[Tensor, ...]:
        grouped = whole.view(sizes.groups, per_group + 2, size, whole.shape[-1])
        return tuple(w.flatten(0, 2) for w in grouped.split([per_group, 1, 1], 1))

    hf = tuple(f"{prefix}.{x}_proj.weight" for x in "qkv")
    return Entry(name, hf, join, split, lambda w, rank, ranks: w.chunk(ranks)[rank], torch.cat)


def _gate_up(name: str, prefix: str) -> Entry:
    """Gate rows, then up rows; a shard holds its gate rows, then its up rows."""

    def shard(whole: Tensor, rank: int, ranks: int) -> Tensor:
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])

    def unshard(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])

    hf = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
    return Entry(name, hf, lambda gate, up: torch.cat([gate, up]), lambda w: w.chunk(2), shard, unshard)


def qwen3_entries(sizes: Sizes) -> Iterator[Entry]:
    """``Qwen3ForCausalLM``."""
    yield _sharded("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0)
    for i in range(sizes.layers):
        ours, hf = f"decoder.layers.{i}", f"model.layers.{i}"
        yield _replicated(f"{ours}.input_layernorm.weight", f"{hf}.input_layernorm.weight")
        yield _qkv(f"{ours}.self_attention.linear_qkv.weight", f"{hf}.self_attn", sizes)
        for x in "qk":
            yield _replicated(f"{ours}.self_attention.{x}_layernorm.weight", f"{hf}.self_attn.{x}_norm.weight")
        yield _sharded(f"{ours}.self_attention.linear_proj.weight", f"{hf}.self_attn.o_proj.weight", 1)
        yield _replicated(f"{ours}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight")
        yield _gate_up(f"{ours}.mlp.linear_fc1.weight", f"{hf}.mlp")
        yield _sharded(f"{ours}.mlp.linear_fc2.weight", f"{hf}.mlp.down_proj.weight", 1)
    yield _replicated("decoder.final_layernorm.weight", "model.norm.weight")
    # A tied model holds it only on a last pipeline stage that lacks the embedding.
    yield _sharded("output_layer.weight", "model.embed_tokens.weight" if sizes.tied else "lm_head.weight", 0)


ENTRIES: dict[str, Callable[[Sizes], Iterator[Entry]]] = {"Qwen3ForCausalLM": qwen3_entries}


def entries(hf_config) -> list[Entry]:
    """Mapping of an HF model.

    Args:
        hf_config: transformers config with ``architectures``.

    Raises:
        ContractError: unknown architecture.
    """
    architecture = (hf_config.architectures or ["none"])[0]
    if architecture not in ENTRIES:
        raise ContractError(f"checkpoint: expected one of {', '.join(ENTRIES)}, found architecture {architecture}; add its mapping")
    sizes = Sizes(
        heads=hf_config.num_attention_heads,
        groups=hf_config.num_key_value_heads,
        head_size=hf_config.head_dim,
        layers=hf_config.num_hidden_layers,
        tied=hf_config.tie_word_embeddings,
    )
    return list(ENTRIES[architecture](sizes))


def load_hf(model: torch.nn.Module, hf_config, folder: str | Path, *, layer_offset: int = 0, rank: int = 0, ranks: int = 1) -> None:
    """Fill a ``GPTModel``'s parameters from the ``*.safetensors`` of an HF checkpoint.

    Args:
        model: the (unwrapped) model of this pipeline stage.
        hf_config: transformers config of the checkpoint.
        folder: HF checkpoint.
        layer_offset: global index of the stage's first layer.
        rank, ranks: tensor-parallel rank and degree.

    Raises:
        ContractError: a tensor or parameter is missing, left over, of another shape or dtype; all are named.
    """
    stored = _Stored(Path(folder))
    mapping = entries(hf_config)
    parameters = _global_parameters(model, layer_offset)
    _refuse_unmapped(mapping, parameters, stored.names(), hf_config.tie_word_embeddings)
    for entry in mapping:
        if entry.name not in parameters:  # another pipeline stage's
            continue
        parameter = parameters[entry.name]
        tensor = entry.shard(_pad_vocabulary(entry, entry.join(*map(stored.tensor, entry.hf)), parameter, ranks), rank, ranks)
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise ContractError(
                f"checkpoint: {entry.name} is {parameter.dtype} {tuple(parameter.shape)}, {' + '.join(entry.hf)} give {tensor.dtype} "
                f"{tuple(tensor.shape)}; store the checkpoint in the parameters' dtype"
            )
        with torch.no_grad():
            parameter.copy_(tensor)


def hf_tensors(
    model: torch.nn.Module, hf_config, *, layer_offset: int = 0, group=None, read: Callable[[torch.nn.Parameter], Tensor] = torch.Tensor.detach
) -> dict[str, Tensor]:
    """Whole HF tensors of a ``GPTModel``'s parameters, copies on the CPU.

    Args:
        model, hf_config, layer_offset: as in :func:`load_hf`.
        group: tensor-parallel process group or None; every rank of it must call and gets the whole tensors.
        read: what to export of a parameter: its value, or for example its gradient.
    """
    parameters = _global_parameters(model, layer_offset)
    found = {}
    for entry in entries(hf_config):
        if entry.name not in parameters:
            continue
        whole = entry.unshard(_gather(read(parameters[entry.name]), group))
        if entry.hf[0] in _VOCABULARY:
            whole = whole[: hf_config.vocab_size]
        found.update(zip(entry.hf, (part.cpu().clone().contiguous() for part in entry.split(whole)), strict=True))
    return found


def gather_stages(tensors: dict[str, Tensor], group) -> dict[str, Tensor]:
    """Tensors of every pipeline stage (process group ``group``), on every stage; of a tensor that two stages hold, the first."""
    if group.size() == 1:
        return tensors
    stages = [None] * group.size()
    dist.all_gather_object(stages, tensors, group=group)
    return {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}


def save_hf(tensors: dict[str, Tensor], folder: str | Path) -> Path:
    """Write ``folder/model.safetensors``: complete or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = folder / f".model.safetensors.{os.getpid()}"
    try:
        save_file(tensors, scratch, metadata={"format": "pt"})
        os.replace(scratch, folder / "model.safetensors")
    finally:
        scratch.unlink(missing_ok=True)
    return folder / "model.safetensors"


_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


def _pad_vocabulary(entry: Entry, whole: Tensor, parameter: Tensor, ranks: int) -> Tensor:
    """Zero rows up to the model's padded vocabulary; the log-softmax excludes them by selection."""
    missing = parameter.shape[0] * ranks - whole.shape[0]
    if entry.hf[0] not in _VOCABULARY or missing <= 0:
        return whole
    return torch.cat([whole, whole.new_zeros(missing, whole.shape[1])])


def _gather(part: Tensor, group) -> list[Tensor]:
    if group is None or group.size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


def _global_parameters(model: torch.nn.Module, layer_offset: int) -> dict[str, torch.nn.Parameter]:
    named = {}
    for name, parameter in model.named_parameters():
        head, mark, tail = name.partition("decoder.layers.")
        if mark:
            index, _, rest = tail.partition(".")
            name = f"{head}{mark}{int(index) + layer_offset}.{rest}"
        named[name] = parameter
    return named


def _refuse_unmapped(mapping: list[Entry], parameters: dict, stored: set[str], tied: bool) -> None:
    wanted = {name for entry in mapping for name in entry.hf}
    optional = {"lm_head.weight"} if tied else set()
    faults = {
        "parameters without HF tensors": set(parameters) - {entry.name for entry in mapping},
        "HF tensors missing from the checkpoint": wanted - stored,
        "HF tensors that belong to no parameter": stored - wanted - optional,
    }
    lines = [f"{what}: {', '.join(sorted(names))}" for what, names in faults.items() if names]
    if lines:
        raise ContractError("checkpoint: names do not match; " + "; ".join(lines))


class _Stored:
    """Tensors of a folder's safetensors files, read one at a time."""

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if single.exists():
            with safe_open(single, "pt") as file:
                self._file_of = {name: single for name in file.keys()}
        elif index.exists():
            self._file_of = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        else:
            raise ContractError(f"checkpoint: neither {single.name} nor {index.name} in {folder}")

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], "pt") as file:
            return file.get_tensor(name)
