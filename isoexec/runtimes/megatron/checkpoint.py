"""HF checkpoints into Megatron parameters and back, bit for bit.

Loading cuts this rank's shard; exporting gathers the shards. A tensor of another dtype than the parameter's is refused, unless its mapping
entry allows a cast that loses no bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from isoexec.contract import ContractError, active_contract
from isoexec.contract.manifest import Manifest, TensorDigest
from isoexec.ops._core.digest import PendingDigests, begin_digests
from isoexec.runtimes.megatron.exchange import CPU, gather_texts, share_tensors
from isoexec.runtimes.megatron.hf_files import HFFiles
from isoexec.runtimes.megatron.mapping import EXPERT_BIAS, VOCABULARY, Entry, entries

Tensor = torch.Tensor

#: Ends of the names of buffers that no op of ours reads: the rope table is an op's, and tokens are counted for the next step's bias.
_UNREAD_BUFFERS = ("rotary_pos_emb.inv_freq", "router.local_tokens_per_expert")


def load_hf(
    model: torch.nn.Module,
    hf_config,
    folder: str | Path,
    *,
    layer_offset: int = 0,
    rank: int = 0,
    ranks: int = 1,
    expert_rank: int = 0,
    expert_ranks: int = 1,
) -> None:
    """Fill a ``GPTModel``'s parameters from the ``*.safetensors`` of an HF checkpoint.

    Args:
        model: the (unwrapped) model of this pipeline stage.
        hf_config: transformers config of the checkpoint.
        folder: HF checkpoint.
        layer_offset: global index of the stage's first layer.
        rank, ranks: tensor-parallel rank and degree.
        expert_rank, expert_ranks: expert-parallel rank and degree.

    Raises:
        ContractError: a tensor or parameter is missing, left over, of another shape or dtype; all are named.
    """
    stored = HFFiles(folder)
    mapping = entries(hf_config)
    parameters = global_parameters(model, layer_offset, expert_rank, expert_ranks)
    _refuse_unmapped(mapping, parameters, stored.names(), hf_config.get_text_config().tie_word_embeddings)
    for entry in mapping:
        if entry.name not in parameters:  # another rank's
            continue
        parameter = parameters[entry.name]
        whole = _pad_vocabulary(entry, entry.join(*map(stored.tensor, entry.hf)), parameter, ranks)
        tensor = _recast(entry, entry.shard(whole, rank, ranks), parameter)
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise ContractError(
                f"checkpoint: {entry.name} is {parameter.dtype} {tuple(parameter.shape)}, {' + '.join(entry.hf)} give {tensor.dtype} "
                f"{tuple(tensor.shape)}; store the checkpoint in the parameters' dtype"
            )
        with torch.no_grad():
            parameter.copy_(tensor)


def hf_tensors(
    model: torch.nn.Module,
    hf_config,
    *,
    layer_offset: int = 0,
    group=None,
    expert_group=None,
    read: Callable[[torch.nn.Parameter], Tensor | None] = torch.Tensor.detach,
    device: torch.device = CPU,
) -> dict[str, Tensor]:
    """Whole HF tensors of a ``GPTModel``'s parameters: copies on the CPU, or on the parameters' own device views where that is possible.

    Args:
        model, hf_config, layer_offset: as in :func:`load_hf`.
        group: tensor-parallel process group or None; every rank of it must call and gets the whole tensors.
        expert_group: expert-parallel process group or None; likewise.
        read: what to export of a parameter: its value, or for example its gradient; None leaves it out.
        device: where the tensors are wanted. What stays on the parameters' device is read before the next optimizer step, or is lost.
    """
    found = {}
    parameters = global_parameters(model, layer_offset, *_place(expert_group))
    for entry, name, part in _hf_parts(parameters, entries(hf_config), hf_config, group, read):
        part = (part.float() if entry.fp32 else part).to(device).contiguous()
        found[name] = part.clone() if device.type == "cpu" else part
    return found if expert_group is None else share_tensors(found, expert_group, device)


def begin_hf_digests(model: torch.nn.Module, hf_config, *, layer_offset: int = 0, group=None, expert_group=None) -> PendingDigests:
    """Digests, in the parameters' dtypes, of the whole HF tensors that this rank holds or takes part in; arguments of :func:`hf_tensors`.

    The parameters must not be written before the device has done what was launched.

    Raises:
        ContractError: a parameter or buffer of the model has no HF name.
    """
    mapping, parameters = entries(hf_config), global_parameters(model, layer_offset, *_place(expert_group))
    unknown = parameters.keys() - {entry.name for entry in mapping}
    unknown |= {name for name, _ in model.named_buffers() if not name.endswith((*_UNREAD_BUFFERS, f".{EXPERT_BIAS}"))}
    if unknown:
        raise ContractError(
            f"weights: {', '.join(sorted(unknown)[:4])} of the trainer have no HF name: the engine could lack them unseen; add them to "
            "isoexec/runtimes/megatron/mapping.py"
        )
    parts = _hf_parts(parameters, mapping, hf_config, group, torch.Tensor.detach)
    return begin_digests((name, part) for _, name, part in parts)


def manifest_of_ranks(digests: PendingDigests) -> Manifest:
    """The manifest of a model from the :func:`begin_hf_digests` of every process; every process calls, and each gets it.

    Raises:
        ContractError: one process, or two, hold the same tensor with other bits in it.
    """
    own = Manifest(_merge([digests.result()]))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    texts = gather_texts(json.dumps(own.data()))
    return Manifest(_merge(Manifest.from_data(json.loads(text)).tensors.items() for text in texts))


def _merge(parts: Iterable[Iterable[tuple[str, TensorDigest]]]) -> dict[str, TensorDigest]:
    """Digests by name; what is held several times (replicas, a tied head on another pipeline stage) must be the same."""
    found: dict[str, TensorDigest] = {}
    for part in parts:
        for name, digest in part:
            if found.setdefault(name, digest) != digest:
                raise ContractError(
                    f"weights.{name}: two copies in the trainer differ: {found[name]} and {digest}; replicas have drifted apart: restart "
                    "from a checkpoint"
                )
    return found


def _hf_parts(parameters: dict[str, Tensor], mapping: list[Entry], hf_config, group, read) -> Iterator[tuple[Entry, str, Tensor]]:
    """(entry, HF name, whole HF tensor) of this rank's parameters, by global names; shards are gathered over ``group``."""
    sharded = group is not None and group.size() > 1
    for entry in mapping:
        if entry.name not in parameters:
            continue
        part = read(parameters[entry.name])
        if part is None:
            continue
        whole = entry.unshard(_gather(part, group)) if sharded and entry.unshard else part
        if entry.hf[0] in VOCABULARY:
            whole = whole[: hf_config.get_text_config().vocab_size]
        for name, part in zip(entry.hf, entry.split(whole), strict=True):
            yield entry, name, part


def policy_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by name, and the buffers without which the policy would be another one."""
    biases = {name: buffer for name, buffer in model.named_buffers() if name.rpartition(".")[2] == EXPERT_BIAS}
    return dict(model.named_parameters()) | biases


def global_parameters(
    model: torch.nn.Module, layer_offset: int, expert_rank: int = 0, expert_ranks: int = 1
) -> dict[str, Tensor]:
    """:func:`policy_tensors` by their names with global layer and expert indices."""

    def renamed(name: str) -> str:
        name = re.sub(r"(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + layer_offset}", name)
        return re.sub(r"(local_experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)

    named = policy_tensors(model)
    held = {m[2] for m in (re.search(r"(local_experts\.)(\d+)", name) for name in named) if m}
    first_expert = expert_rank * len(held) if expert_ranks > 1 else 0
    return {renamed(name): parameter for name, parameter in named.items()}


def _recast(entry: Entry, tensor: Tensor, parameter: torch.nn.Parameter) -> Tensor:
    """The tensor in the parameter's dtype, where the entry allows it.

    Raises:
        ContractError: bits would be lost, or under a contract an fp32 parameter is none.
    """
    contract = active_contract()
    if contract is not None and entry.fp32 and parameter.dtype != torch.float32:
        raise ContractError(f"checkpoint: {entry.name} is {parameter.dtype}, expected torch.float32: its op would compute another number")
    if not entry.recast or tensor.dtype == parameter.dtype:
        return tensor
    cast = tensor.to(parameter.dtype)
    if contract is not None and not torch.equal(cast.double(), tensor.double()):
        raise ContractError(
            f"checkpoint: {entry.hf[0]} is {tensor.dtype} and {entry.name} {parameter.dtype}: the cast loses bits; store the checkpoint in "
            "the parameter's dtype"
        )
    return cast  # without a contract upstream's modules hold bf16 and round


def _pad_vocabulary(entry: Entry, whole: Tensor, parameter: Tensor, ranks: int) -> Tensor:
    """Zero rows up to the model's padded vocabulary; the log-softmax excludes them by selection."""
    missing = parameter.shape[0] * ranks - whole.shape[0]
    if entry.hf[0] not in VOCABULARY or missing <= 0:
        return whole
    return torch.cat([whole, whole.new_zeros(missing, whole.shape[1])])


def _place(group) -> tuple[int, int]:
    """(rank, ranks) in a process group; None: alone."""
    return (0, 1) if group is None else (group.rank(), group.size())


def _gather(part: Tensor, group) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts


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
