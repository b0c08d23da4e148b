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
        "16": {"BV": 64, "num_warps": 4, "stages": 2, "unroll": 2},
        "32": {"BV": 64, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "chain_narrow": {  # few (sequence, head) pairs: smaller slices of V shorten a step
        "16": {"BV": 16, "num_warps": 1, "stages": 3, "unroll": 4},
        "32": {"BV": 32, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "recur": dict.fromkeys(("16", "32", "64"), {"BV": 16, "num_warps": 4}),
    "recur_step": dict.fromkeys(("16", "32", "64"), {"BV": 32, "num_warps": 4}),
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
    "back_chain_narrow": {
        "16": {"BV": 16, "num_warps": 1, "stages": 3},
        "32": {"BV": 32, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "back_inner": dict.fromkeys(("16", "32", "64"), {"BV": 64, "num_warps": 4, "stages": 3}),
    # back_key takes the BK of back_query, whose parts it completes.
    "back_query": dict.fromkeys(("16", "32", "64"), {"BK": 64, "BV": 64, "num_warps": 4, "stages": 2}),
    "back_key": dict.fromkeys(("16", "32", "64"), {"BV": 64, "num_warps": 4, "stages": 2}),
    "back_gate": dict.fromkeys(("16", "32", "64"), {"num_warps": 1}),
    "decode_pre": {"16": {"num_warps": 1}, "32": {"num_warps": 2}, "64": {"num_warps": 4}},
    "decode_main": {
        "16": {"BV": 64, "num_warps": 4, "two_launches": 1},
        "32": {"BV": 64, "num_warps": 4, "two_launches": 1},
        "64": {"BV": 64, "num_warps": 4, "two_launches": 1},
    },
    "decode_gated": {  # whole heads: the norm follows
        "16": {"BV": 128, "num_warps": 8},
        "32": {"BV": 128, "num_warps": 8},
        "64": {"BV": 128, "num_warps": 8},
    },
}

_SOURCES = ("tiles.py", "kernels.py", "kernels_decode.py", "kernels_backward.py", "kernels_cpr.py", "kernels_edges.py",
            "kernels_edges_backward.py", "../_core/triton_math.py")  # fmt: skip


def settings(kernel: str, chunk: int, V: int | None = None, K: int | None = None) -> dict[str, int]:
    """Settings of one launch; BV is cut to V, BK to K for small heads.

    Raises:
        ContractError: the table has no entry.
    """
    try:
        entry = dict(TABLE[kernel][str(chunk)])
    except KeyError:
        raise ContractError(f"gdn: no launch configuration for kernel {kernel!r} at C = {chunk}; add it to gdn/launch.py") from None
    for name, size in (("BV", V), ("BK", K)):
        if size is not None and name in entry:
            entry[name] = min(entry[name], size)
    return entry


def digest() -> str:
    """sha256 of the kernels' sources and of the table."""
    here, h = Path(__file__).parent, hashlib.sha256()
    for name in _SOURCES:
        h.update((here / name).read_bytes())
    h.update(json.dumps(TABLE, sort_keys=True).encode())
    return h.hexdigest()
