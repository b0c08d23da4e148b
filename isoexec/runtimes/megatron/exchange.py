"""What ranks tell each other, as text and as tensors. torch.distributed's exchange of objects would unpickle what another host sends."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

Tensor = torch.Tensor

CPU = torch.device("cpu")


def gather_texts(text: str, group=None) -> list[str]:
    """The text of every rank of ``group`` (None: of all), in their order; every rank calls, each gets them."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [text]
    data = text.encode()
    lengths = [int(length) for length in _gather(torch.tensor([len(data)]), group)]
    padded = torch.frombuffer(bytearray(data.ljust(max(*lengths, 1), b"\0")), dtype=torch.uint8)
    return [part.numpy().tobytes()[:length].decode() for part, length in zip(_gather(padded, group), lengths, strict=True)]


def share_tensors(tensors: dict[str, Tensor], group, device: torch.device = CPU) -> dict[str, Tensor]:
    """Tensors of every rank of ``group``, on every rank, on ``device``; of a name that several hold, the first's.

    Args:
        tensors: contiguous, on ``device``.
        group: process group; every rank of it calls.
    """
    if group.size() == 1:
        return tensors
    own = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
    found: dict[str, Tensor] = {}
    for rank, text in enumerate(gather_texts(json.dumps(own), group)):
        for name, dtype, shape in json.loads(text):
            if name not in found:
                mine = rank == group.rank()
                tensor = tensors[name] if mine else torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                found[name] = _broadcast(tensor, rank, group)
    return found


def _broadcast(tensor: Tensor, rank: int, group) -> Tensor:
    """``tensor`` of a rank of ``group``; the others give one of its shape and dtype, which is filled."""
    moved = tensor.reshape(-1).view(torch.uint8).to(_device(group))
    dist.broadcast(moved, dist.get_global_rank(group, rank), group=group)
    return moved.to(tensor.device).view(tensor.dtype).view(tensor.shape)


def _gather(tensor: Tensor, group) -> list[Tensor]:
    """``tensor`` of every rank, all of one shape, on the CPU."""
    moved = tensor.to(_device(group))
    parts = [torch.empty_like(moved) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, moved, group=group)
    return [part.cpu() for part in parts]


def _device(group) -> torch.device:
    """Where the backend of ``group`` wants its tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
