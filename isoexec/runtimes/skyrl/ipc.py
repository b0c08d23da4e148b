"""Tensors that pass between processes of one GPU: a handle travels, as text, and the bytes stay where they are."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

Tensor = torch.Tensor

_ALIGNMENT = 16  # bytes: of any dtype's element, and of a vector access
_BYTES = ("handle", "ref_counter_handle", "event_handle")
#: What torch's reduction of a CUDA tensor ends with, in its order.
_FIELDS = ("device", "handle", "size", "offset", "requires_grad", "ref_counter_handle", "ref_counter_offset", "event_handle", "event_sync")


class Entry(NamedTuple):
    """Where a tensor lies in a packed buffer; as a list it travels as JSON."""

    name: str
    dtype: str
    shape: list[int]
    start: int


def pack(tensors: Iterable[tuple[str, Tensor]], limit: int, device: torch.device) -> Iterator[tuple[list[Entry], Tensor]]:
    """(entries, uint8 buffer on ``device``) of tensors of any dtypes, in their order.

    Args:
        tensors: (name, tensor), on any device.
        limit: bytes of a buffer; a larger tensor has one of its own.
    """
    waiting, entries, size = [], [], 0
    for name, tensor in tensors:
        start = _aligned(size)
        if waiting and start + tensor.nbytes > limit:
            yield entries, _filled(waiting, entries, size, device)
            waiting, entries, start = [], [], 0
        waiting.append(tensor)
        entries.append(Entry(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start))
        size = start + tensor.nbytes
    if waiting:
        yield entries, _filled(waiting, entries, size, device)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _filled(tensors: list[Tensor], entries: list[Entry], size: int, device: torch.device) -> Tensor:
    packed = torch.empty(size, dtype=torch.uint8, device=device)
    for tensor, entry in zip(tensors, entries, strict=True):
        packed[entry.start : entry.start + tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return packed


def unpack(entries: list, packed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, view) of each tensor of :func:`pack`."""
    for name, dtype, shape, start in entries:
        kind = getattr(torch, dtype)
        yield name, packed[start : start + kind.itemsize * math.prod(shape)].view(kind).view(shape)


def share(packed: Tensor) -> dict:
    """JSON object by which another process of the same GPU opens a CUDA buffer; keep the buffer until it has."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(packed)
    found = dict(zip(_FIELDS, arguments[6:], strict=True))
    return found | {name: base64.b64encode(found[name]).decode() for name in _BYTES} | {"bytes": packed.numel(), "start": arguments[3]}


def gpu() -> str:
    """Name of this process's current GPU, the same in every process of a machine."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def opened(shared: dict) -> Tensor:
    """The buffer of :func:`share`, in another process; its owner frees it when this one has dropped it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = shared | {name: base64.b64decode(shared[name]) for name in _BYTES} | {"device": torch.cuda.current_device()}
    return rebuild_cuda_tensor(
        torch.Tensor, torch.Size([shared["bytes"]]), (1,), shared["start"], torch.storage.TypedStorage, torch.uint8,
        *(arguments[name] for name in _FIELDS),
    )  # fmt: skip
