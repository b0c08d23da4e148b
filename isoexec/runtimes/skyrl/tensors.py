"""Named tensors in a safetensors file: written whole or not at all, read one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``path`` through a scratch file beside it."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_tensors(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of a file."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            yield name, file.get_tensor(name)

