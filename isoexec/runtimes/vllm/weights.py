"""vLLM's parameters as the logical tensors of the checkpoint: the inverse of its loader, written apart from it.

vLLM stacks projections and experts. Here they are cut again by the sizes of its layers, under the names of
:mod:`isoexec.runtimes.megatron.mapping`: those of a text-only checkpoint with one tensor for each expert's matrix.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from isoexec.contract import ContractError
from isoexec.contract.manifest import Manifest
from isoexec.ops._core.digest import tensors_digest
from isoexec.ops.collective.reference import all_gather

Tensor = torch.Tensor

#: Stacked projection -> (HF projection, how many of the layer's output sizes it spans), in row order.
_STACKED = {
    "qkv_proj": (("q_proj", 1), ("k_proj", 1), ("v_proj", 1)),
    "gate_up_proj": (("gate_proj", 1), ("up_proj", 1)),
    "in_proj_qkvz": (("in_proj_qkv", 3), ("in_proj_z", 1)),
    "in_proj_ba": (("in_proj_b", 1), ("in_proj_a", 1)),
}

_EXPERTS = ("w13_weight", "w2_weight")

#: Ends of the names of buffers that no op of ours reads: the rope table is an op's, and the cache is not quantised.
_UNREAD_BUFFERS = ("rotary_emb.cos_sin_cache", "experts._expert_map", "attn._q_scale", "attn._k_scale", "attn._v_scale", "attn._prob_scale")


def manifest(model: torch.nn.Module) -> Manifest:
    """Digests of every parameter of a vLLM model, by HF name; whole, also where ranks hold shards: every rank calls.

    Raises:
        ContractError: a parameter or buffer has no HF name.
    """
    return Manifest(tensors_digest(hf_tensors(model)))


def hf_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, tensor) of every logical tensor of a vLLM model: views, or what the ranks' shards make together; every rank calls.

    Raises:
        ContractError: as :func:`manifest`.
    """
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():  # a tied head is the embedding, and comes once
        prefix, _, kind = name.rpartition(".")
        module = modules[prefix]
        sizes = _sizes(module, modules[prefix.rpartition(".")[0]])
        yield from _parts(name.removeprefix("language_model."), module, sizes, kind, _shards(module, kind, parameter.detach()))
    unknown = [name for name, _ in model.named_buffers() if not name.endswith(_UNREAD_BUFFERS)]
    if unknown:
        raise ContractError(
            f"weights: buffers {', '.join(unknown[:4])} of the engine have no HF name: a stale one would go unseen; add them to "
            "isoexec/runtimes/vllm/weights.py"
        )


def _shards(module: torch.nn.Module, kind: str, parameter: Tensor) -> list[Tensor]:
    """The ranks' shards of a parameter, cut by rows; one that is cut by columns comes whole, as one that is not cut."""
    ranks = module.ep_size if kind in _EXPERTS else getattr(module, "tp_size", 1)
    if ranks == 1 or isinstance(module, ReplicatedLinear):
        return [parameter]
    shards = list(all_gather(parameter, get_tp_group().device_group).unbind())
    return [torch.cat(shards, 1)] if isinstance(module, RowParallelLinear) else shards


def _sizes(module: torch.nn.Module, parent: torch.nn.Module) -> list[int] | None:
    """Rows of each part that a rank's shard stacks; None where it is one part."""
    if hasattr(module, "output_partition_sizes") and hasattr(module, "output_sizes"):
        return list(module.output_partition_sizes)
    if module is getattr(parent, "conv1d", None):  # the channels of q, k and v
        return [size // parent.tp_size for size in (parent.key_dim, parent.key_dim, parent.value_dim)]
    return None


def _parts(name: str, module: torch.nn.Module, sizes: list[int] | None, kind: str, shards: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    prefix, _, layer = name.rpartition(".")[0].rpartition(".")
    if sizes is None:
        sizes = [shards[0].shape[0]]
    if sum(sizes) != shards[0].shape[0]:
        raise ContractError(f"weights.{name}: {shards[0].shape[0]} rows are not the parts of {sizes}; add its mapping")
    if layer in _STACKED:
        first = 0
        for hf, spans in _STACKED[layer]:
            yield f"{prefix}.{hf}.{kind}", _rows(shards, sizes, first, spans)
            first += spans
        if first != len(sizes):
            raise ContractError(f"weights.{name}: parts of {sizes} rows are not the projections {_STACKED[layer]}; add its mapping")
        return
    whole = _rows(shards, sizes, 0, len(sizes))
    if kind in _EXPERTS:
        yield from _experts(name.rpartition(".")[0], kind, whole)
    elif layer in ("embed_tokens", "lm_head"):
        yield name, whole[: module.org_vocab_size]  # rows of padding are never read
    else:
        yield name, whole


def _rows(shards: list[Tensor], sizes: list[int], first: int, count: int) -> Tensor:
    """``count`` parts from ``first`` on, each of all ranks."""
    ends = [0, *itertools.accumulate(sizes)]
    if len(shards) == 1:
        return shards[0][ends[first] : ends[first + count]]
    return torch.cat([shard[ends[part] : ends[part + 1]] for part in range(first, first + count) for shard in shards])


def _experts(prefix: str, kind: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of [E, rows, columns]: gate rows then up rows of each expert in ``w13``, down in ``w2``."""
    matrices = ("down_proj",) if kind == "w2_weight" else ("gate_proj", "up_proj")
    # All views at once: half the time of one by one, and a large model has tens of thousands.
    for index, matrix in enumerate(parameter.unflatten(1, (len(matrices), -1)).flatten(0, 1).unbind()):
        expert, which = divmod(index, len(matrices))
        yield f"{prefix}.{expert}.{matrices[which]}.weight", matrix
