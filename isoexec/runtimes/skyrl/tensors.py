"""Named tensors in a safetensors file: written whole or not at all, read one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``path`` through a scratch file beside it. Two names of one tensor (an fp32 parameter, its master weight) are two entries."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(_apart(tensors), scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the CPU, contiguous, and no two in one storage, which safetensors refuses."""
    found, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return found


def read_tensors(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of a file."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)

