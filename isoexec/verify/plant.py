"""The instrument's negative control: a copy of a checkpoint in which one weight is off by one unit in the last place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from isoexec.contract import ContractError

#: Rounded into every hidden state of the model, so the fault is small but everywhere downstream.
PLANTED_WEIGHT = "layers.0.input_layernorm.weight"


def plant_ulp(model: Path, folder: Path) -> str:
    """Copy ``model`` to ``folder`` and move the first element of one bf16 weight by one ulp.

    Returns:
        The name of the weight.

    Raises:
        ContractError: no shard holds a bf16 weight whose name ends in :data:`PLANTED_WEIGHT`.
    """
    shutil.copytree(model, folder)
    for shard in sorted(folder.glob("*.safetensors")):
        with open(shard, "r+b") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_size))
            for name, entry in header.items():
                if name.endswith(PLANTED_WEIGHT) and entry["dtype"] == "BF16":
                    file.seek(8 + header_size + entry["data_offsets"][0])
                    low_byte = file.read(1)[0]
                    file.seek(-1, 1)
                    file.write(bytes([low_byte ^ 1]))  # the lowest bit of the mantissa
                    return name
    raise ContractError(f"model {str(model)!r}: no bf16 weight {PLANTED_WEIGHT!r} in its safetensors to plant a fault in")
