"""The instrument's negative control: a copy of a checkpoint in which one weight is off by one unit in the last place."""

from __future__ import annotations

import shutil
from pathlib import Path

from isoexec.contract import ContractError
from isoexec.contract.weights import read_header

#: Rounded into every hidden state of the model, so the fault is small but everywhere downstream. The prefix tells a text-only checkpoint from
#: one with a vision tower; a draft head (``mtp.layers.0...``), which neither side loads, has another.
PLANTED_WEIGHT = "layers.0.input_layernorm.weight"
_NAMES = tuple(f"{prefix}.{PLANTED_WEIGHT}" for prefix in ("model", "model.language_model"))


def plant_ulp(model: Path, folder: Path) -> str:
    """Make ``folder`` the checkpoint ``model`` with the first element of one bf16 weight moved by one ulp.

    Only the file that holds the weight is copied; the others are links, since a checkpoint may be large.

    Returns:
        The name of the weight.

    Raises:
        ContractError: a safetensors file is not whole, or none that the runtimes read holds :data:`PLANTED_WEIGHT` in bf16.
    """
    headers = {shard: read_header(shard) for shard in sorted(model.glob("*.safetensors"))}
    single = model / "model.safetensors"
    other = ""
    for shard, (header, data_start) in headers.items():
        if single.exists() and shard != single:
            continue  # not read: a checkpoint of another format beside it
        for name, entry in header.items():
            if name in _NAMES and entry["dtype"] != "BF16":
                other = f", but one in {entry['dtype']}"
            elif name in _NAMES:
                folder.mkdir()
                for file in model.iterdir():
                    if file.is_file() and file != shard:
                        (folder / file.name).symlink_to(file.resolve())
                shutil.copyfile(shard, folder / shard.name)  # not its permissions: it may be read-only
                _flip_lowest_bit(folder / shard.name, data_start + entry["data_offsets"][0])
                return name
    raise ContractError(f"model {str(model)!r}: no weight {PLANTED_WEIGHT!r} in BF16 in its safetensors to plant a fault in{other}")


def _flip_lowest_bit(path: Path, offset: int) -> None:
    """Of the mantissa of the little-endian value at ``offset``."""
    with open(path, "r+b") as file:
        file.seek(offset)
        low_byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([low_byte ^ 1]))
