"""vLLM's parameters as the logical tensors of the checkpoint: the inverse of its loader, written apart from it.

vLLM stacks projections and experts. Here they are cut again by the sizes of its layers, under the names of
:mod:`isoexec.runtimes.megatron.mapping`: those of a text-only checkpoint with one tensor for each expert's matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from isoexec.contract import ContractError
from isoexec.contract.manifest import Manifest
from isoexec.ops._core.digest import tensors_digest

Tensor = torch.Tensor

#: Stacked projection -> (HF projection, how many of the layer's output sizes it spans), in row order.
_STACKED = {
    "qkv_proj": (("q_proj", 1), ("k_proj", 1), ("v_proj", 1)),
    "gate_up_proj": (("gate_proj", 1), ("up_proj", 1)),
    "in_proj_qkvz": (("in_proj_qkv", 3), ("in_proj_z", 1)),
    "in_proj_ba": (("in_proj_b", 1), ("in_proj_a", 1)),
}

#: Ends of the names of buffers that no op of ours reads: the rope table is an op's, and the cache is not quantised.
_UNREAD_BUFFERS = ("rotary_emb.cos_sin_cache", "attn._q_scale", "attn._k_scale", "attn._v_scale", "attn._prob_scale")


def manifest(model: torch.nn.Module) -> Manifest:
    """Digests of every parameter of a vLLM model, by HF name.

    Raises:
        ContractError: a parameter or buffer has no HF name, or the model is sharded.
    """
    return Manifest(tensors_digest(hf_tensors(model)))


def hf_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(HF name, view) of every logical tensor of a vLLM model.

    Raises:
        ContractError: as :func:`manifest`.
    """
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():  # a tied head is the embedding, and comes once
        prefix, _, kind = name.rpartition(".")
        yield from _parts(name.removeprefix("language_model."), modules[prefix], kind, parameter.detach())
    unknown = [name for name, _ in model.named_buffers() if not name.endswith(_UNREAD_BUFFERS)]
    if unknown:
        raise ContractError(
            f"weights: buffers {', '.join(unknown[:4])} of the engine have no HF name: a stale one would go unseen; add them to "
            "isoexec/runtimes/vllm/weights.py"
        )


def _parts(name: str, module: torch.nn.Module, kind: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    prefix, _, layer = name.rpartition(".")[0].rpartition(".")
    if getattr(module, "tp_size", 1) != 1:
        raise ContractError(f"weights.{name}: expected a whole parameter, found a shard of {module.tp_size}; set tensor_parallel_size to 1")
    if layer in _STACKED:
        sizes, start = list(module.output_sizes), 0
        for hf, spans in _STACKED[layer]:
            rows = sum(sizes[:spans])
            del sizes[:spans]
            yield f"{prefix}.{hf}.{kind}", parameter[start : start + rows]
            start += rows
        if sizes or start != parameter.shape[0]:
            raise ContractError(f"weights.{name}: {parameter.shape[0]} rows do not end with projections {_STACKED[layer]}; add its mapping")
    elif kind in ("w13_weight", "w2_weight"):
        yield from _experts(name.rpartition(".")[0], kind, parameter)
    elif layer in ("embed_tokens", "lm_head"):
        yield name, parameter[: module.org_vocab_size]  # rows of padding are never read
    else:
        yield name, parameter


def _experts(prefix: str, kind: str, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Of [E, rows, columns]: gate rows then up rows of each expert in ``w13``, down in ``w2``."""
    matrices = ("down_proj",) if kind == "w2_weight" else ("gate_proj", "up_proj")
    # All views at once: half the time of one by one, and a large model has tens of thousands.
    for index, matrix in enumerate(parameter.unflatten(1, (len(matrices), -1)).flatten(0, 1).unbind()):
        expert, which = divmod(index, len(matrices))
        yield f"{prefix}.{expert}.{matrices[which]}.weight", matrix
