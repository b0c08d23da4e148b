"""The ``*.safetensors`` of an HF folder under one set of names, whichever form they are stored in.

Forms: a model with a vision tower keeps its language model under ``model.language_model.``; a layer's experts are separate matrices, or
stacked in two tensors. A tower and multi-token-prediction layers, which no policy trains, are carried from folder to folder untouched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from isoexec.contract import ContractError

Tensor = torch.Tensor

_LANGUAGE = "model.language_model."
_CARRIED = ("model.visual.", "mtp.")
_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class HFFiles:
    """Tensors of a folder, read one at a time by the names of :mod:`isoexec.runtimes.megatron.mapping`.

    Raises:
        ContractError: the folder holds no safetensors, or one that cannot be read; so do the methods that read.
    """

    def __init__(self, folder: str | Path):
        self._file_of = _file_of(Path(folder))
        self._nested = any(name.startswith(_LANGUAGE) for name in self._file_of)
        carried = _CARRIED + _prediction_layers(Path(folder))
        self._carried = {name for name in self._file_of if name.startswith(carried)}
        self._stacked = any(_STACKED.fullmatch(name) for name in self._file_of)
        #: name -> stored name, expert in its first dimension or None, rows of it
        self._where: dict[str, tuple[str, int | None, slice]] = {}
        for stored in self._file_of.keys() - self._carried:
            self._enter(stored)

    def _enter(self, stored: str) -> None:
        name = stored.replace(_LANGUAGE, "model.", 1) if self._nested else stored
        match = _STACKED.fullmatch(name)
        if not match:
            self._where[name] = stored, None, slice(None)
            return
        prefix, kind = match.groups()
        count, rows, _ = self._shape(stored)
        halves = {"gate": slice(0, rows // 2), "up": slice(rows // 2, rows)} if kind == "gate_up" else {"down": slice(None)}
        for e in range(count):
            self._where |= {f"{prefix}.{e}.{half}_proj.weight": (stored, e, part) for half, part in halves.items()}

    def _shape(self, stored: str) -> list[int]:
        with _opened(self._file_of[stored]) as file:
            return file.get_slice(stored).get_shape()

    def names(self) -> set[str]:
        """Names of the language model's tensors."""
        return set(self._where)

    def tensor(self, name: str) -> Tensor:
        """One tensor as stored, on the CPU."""
        stored, expert, rows = self._where[name]
        with _opened(self._file_of[stored]) as file:
            return file.get_tensor(stored) if expert is None else file.get_slice(stored)[expert, rows]

    def in_stored_form(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Trained tensors under the names and in the form of this folder, and beside them the folder's untrained ones."""
        if self._stacked:
            tensors = _stack(tensors)
        if self._nested:
            tensors = {re.sub(r"^model\.", _LANGUAGE, name): tensor for name, tensor in tensors.items()}
        return tensors | {name: self._read_carried(name) for name in self._carried}

    def _read_carried(self, stored: str) -> Tensor:
        with _opened(self._file_of[stored]) as file:
            return file.get_tensor(stored)


@contextlib.contextmanager
def _opened(path: Path):
    """A safetensors file, open.

    Raises:
        ContractError: names a file that cannot be read, now or inside the block.
    """
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ContractError(f"checkpoint: {path} cannot be read: {error}; download or convert it again") from error


def _stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found, experts = {}, {}
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match:
            prefix, e, kind = match.groups()
            experts.setdefault(prefix, {})[int(e), kind] = tensor
        else:
            found[name] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(e for e, _ in parts)
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(count)])
        found[f"{prefix}.down_proj"] = torch.stack([parts[e, "down"] for e in range(count)])
    return found


def _prediction_layers(folder: Path) -> tuple[str, ...]:
    """Prefixes of multi-token-prediction layers, where a checkpoint numbers them after its decoder's."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers") or 0
    return tuple(f"model.layers.{first + i}." for i in range(count))


def _file_of(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.exists():
        with _opened(single) as file:
            return {name: single for name in file.keys()}
    if index.exists():
        try:
            files = {name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ContractError(f"checkpoint: {index} is no index of weights; download or convert it again") from None
        if missing := sorted({file.name for file in files.values() if not file.is_file()}):
            raise ContractError(f"checkpoint: {folder} lacks {', '.join(missing)}, which {index.name} names; download it again")
        return files
    raise ContractError(f"checkpoint: neither {single.name} nor {index.name} in {folder}")


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
