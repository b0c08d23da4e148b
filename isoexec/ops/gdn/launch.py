"""Launch configurations of the Triton kernels: a committed table, never tuned at run time, part of the implementation's identity."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from isoexec.contract import ContractError

# (kernel, C) -> settings. Measured on sm_90 (bench/gdn.py --sweep). BV: rows of V a program owns.
TABLE: dict[str, dict[str, dict[str, int]]] = {
    "prepass": {"16": {"num_warps": 1}, "32": {"num_warps": 2}, "64": {"num_warps": 4}},
    "chain": {
        "16": {"BV": 64, "num_warps": 4, "stages": 2},
        "32": {"BV": 64, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "chain_narrow": {  # few (sequence, head) pairs: smaller slices of V shorten a step
        "16": {"BV": 16, "num_warps": 1, "stages": 2},
        "32": {"BV": 32, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "tail": {"16": {"num_warps": 2}, "32": {"num_warps": 2}, "64": {"num_warps": 4}},
    "decode": {
        "16": {"BV": 32, "num_warps": 2},
        "32": {"BV": 32, "num_warps": 2},
        "64": {"BV": 64, "num_warps": 4},
    },
    "back_chain": {
        "16": {"BV": 64, "num_warps": 4, "stages": 2},
        "32": {"BV": 64, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "back_inner": dict.fromkeys(("16", "32", "64"), {"BV": 64, "num_warps": 4}),
    "back_block": dict.fromkeys(("16", "32", "64"), {"BK": 64, "BV": 64, "num_warps": 8}),
    "back_gate": dict.fromkeys(("16", "32", "64"), {"num_warps": 1}),
    "decode_pre": {"16": {"num_warps": 1}, "32": {"num_warps": 2}, "64": {"num_warps": 4}},
    "decode_main": {
        "16": {"BV": 64, "num_warps": 4, "two_launches": 1},
        "32": {"BV": 64, "num_warps": 4, "two_launches": 1},
        "64": {"BV": 64, "num_warps": 4, "two_launches": 1},
    },
}

_SOURCES = ("tiles.py", "kernels.py", "kernels_backward.py", "kernels_edges.py", "../_core/triton_math.py")


def settings(kernel: str, chunk: int, V: int | None = None) -> dict[str, int]:
    """Settings of one launch; BV is cut to V for small heads.

    Raises:
        ContractError: the table has no entry.
    """
    try:
        entry = dict(TABLE[kernel][str(chunk)])
    except KeyError:
        raise ContractError(f"gdn: no launch configuration for kernel {kernel!r} at C = {chunk}; add it to gdn/launch.py") from None
    if V is not None and "BV" in entry:
        entry["BV"] = min(entry["BV"], V)
    return entry


def digest() -> str:
    """sha256 of the kernels' sources and of the table."""
    here, h = Path(__file__).parent, hashlib.sha256()
    for name in _SOURCES:
        h.update((here / name).read_bytes())
    h.update(json.dumps(TABLE, sort_keys=True).encode())
    return h.hexdigest()
