"""The weight files of an HF-format checkpoint, as far as their headers tell: standard library only."""

from __future__ import annotations

import json
from pathlib import Path

from isoexec.contract.errors import ContractError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check_weights(folder: Path) -> None:
    """Refuse a checkpoint whose weight files are not all there, or not whole; a sharded one by its index.

    Raises:
        ContractError: names the file, and what to do.
    """
    for file, names in _weight_files(folder).items():
        if not file.is_file():
            raise ContractError(f"model {str(folder)!r}: {_INDEX} names {file.name}, which is missing; download or convert it again")
        header, _ = read_header(file)
        for name in names:
            if name not in header:
                raise ContractError(f"model {str(folder)!r}: {file.name}: expected tensor {name}, of which {_INDEX} says that it is there")


def read_header(file: Path) -> tuple[dict, int]:
    """Tensors of a safetensors file by name, {"dtype", "shape", "data_offsets"}, and where their data starts.

    Raises:
        ContractError: it is no such file, or longer or shorter than its header says.
    """
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(min(length, size)))
            header.pop("__metadata__", None)
            expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
            raise ContractError(f"model {str(file.parent)!r}: {file.name} is no safetensors file; download or convert it again") from None
    if size != expected:
        raise ContractError(
            f"model {str(file.parent)!r}: {file.name} is not whole: expected {expected} bytes, found {size}; download or convert it again"
        )
    return header, 8 + length


def _weight_files(folder: Path) -> dict[Path, list[str]]:
    """File -> tensors that the index says it holds (none of the only file of a checkpoint that has no index)."""
    if (folder / _SINGLE).exists():
        return {folder / _SINGLE: []}
    try:
        places = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        found: dict[Path, list[str]] = {}
        for name, file in places.items():
            found.setdefault(folder / file, []).append(name)
        return found
    except FileNotFoundError:
        raise ContractError(
            f"model {str(folder)!r}: neither {_SINGLE} nor {_INDEX}; convert the weights with save_pretrained"
        ) from None
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise ContractError(f"model {str(folder)!r}: {_INDEX} cannot be read: {type(error).__name__}: {error}") from None
