"""Launch configurations of the Triton kernels: a committed table, never tuned at run time, part of the implementation's identity."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

from isoexec.contract import ContractError

# (kernel, C, or "any" where C does not matter) -> settings. Measured on sm_90 (bench/gdn.py --sweep). BV: rows of V a program owns; rows:
# tokens of a tile; channels: of a program, halved until they divide; steps: tiles of a program; ahead: rows read at once.
TABLE: dict[str, dict[str, dict[str, int]]] = {
    "prepass": {"16": {"num_warps": 1, "maxnreg": 96}, "32": {"num_warps": 2}, "64": {"num_warps": 4}},
    "chain": {
        "16": {"BV": 64, "num_warps": 4, "stages": 2, "unroll": 2},
        "32": {"BV": 64, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "chain_narrow": {  # few (sequence, head) pairs: smaller slices of V shorten a step
        "16": {"BV": 16, "num_warps": 1, "stages": 2, "unroll": 4},
        "32": {"BV": 32, "num_warps": 4, "stages": 2},
        "64": {"BV": 64, "num_warps": 4, "stages": 2},
    },
    "chain_roles": {  # registers: of the warps beside the state's
        "16": {"BV": 64, "num_warps": 4, "stages": 4, "held": 2, "output_warps": 2, "registers": 56, "maxnreg": 128},
        "32": {"BV": 64, "num_warps": 4, "stages": 4, "held": 2, "output_warps": 2, "registers": 88, "maxnreg": 168},
    },
    "recur": dict.fromkeys(("16", "32", "64"), {"BV": 16, "num_warps": 4}),
    "recur_step": dict.fromkeys(("16", "32", "64"), {"BV": 32, "num_warps": 4}),
    "tail": {"16": {"num_warps": 2}, "32": {"num_warps": 2}, "64": {"num_warps": 4}},
    "decode": {
        "16": {"BV": 32, "num_warps": 2, "maxnreg": 128},  # eight programs on a processor: 8 lanes of 32 heads are one wave
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
    # Up to how many pairs of sequence and value head the narrow chains are faster, and decode is one launch; from how many chunks of
    # the longest sequence a prefill's whole chunks are a launch of their own on sm_90.
    "limits": {"any": {"narrow": 6 * 32, "one_launch": 16 * 32, "hopper_chunks": 8}},
    "conv": {"any": {"rows": 16, "channels": 512, "ahead": 4, "num_warps": 4, "maxnreg": 64}},
    "conv_step": {"any": {"channels": 256, "num_warps": 1}},
    "window": {"any": {"channels": 256, "num_warps": 4}},
    "inputs": {"any": {"rows": 16, "num_warps": 4}},
    "step_inputs": {"any": {"num_warps": 1}},
    "gating": {"any": {"rows": 32, "num_warps": 4}},
    "l2norm": {"any": {"rows": 16, "num_warps": 4}},
    "channels_back": {"any": {"rows": 4, "steps": 32, "channels": 128, "num_warps": 2}},
    "taps_back": {"any": {"rows": 16, "channels": 256, "num_warps": 4}},
    "gating_back": {"any": {"rows": 128, "num_warps": 4}},
    "l2norm_back": {"any": {"rows": 16, "num_warps": 4}},
}

_HERE = Path(__file__).parent


def settings(kernel: str, chunk: int | None = None, V: int | None = None, K: int | None = None) -> dict[str, int]:
    """Settings of one launch, of a kernel that C does not matter to where ``chunk`` is None; BV is cut to V, BK to K for small heads.

    Raises:
        ContractError: the table has no entry.
    """
    try:
        entry = dict(TABLE[kernel]["any" if chunk is None else str(chunk)])
    except KeyError:
        raise ContractError(f"gdn: no launch configuration for kernel {kernel!r} at C = {chunk}; add it to gdn/launch.py") from None
    for name, size in (("BV", V), ("BK", K)):
        if size is not None and name in entry:
            entry[name] = min(entry[name], size)
    return entry


def sources(folder: Path = _HERE) -> list[Path]:
    """Files that decide what the kernels compute and how they are launched; ``folder`` holds this family."""
    own = [path for pattern in ("kernels*.py", "triton_*.py") for path in folder.glob(pattern)]
    ops = folder.parent
    shared = [ops / "_core" / "triton_math.py", ops / "_core" / "rows.py", ops / "norm" / "triton.py"]  # the gated norm around the core
    return sorted([*own, folder / "tiles.py", folder / "state.py", folder / "launch.py", *shared])


def digest(folder: Path = _HERE) -> str:
    """sha256 of the code of :func:`sources` and of the table. Comments, docstrings and layout do not count."""
    h = hashlib.sha256()
    for path in sources(folder):
        h.update(f"{path.relative_to(folder.parent).as_posix()}\0{_code(path)}\0".encode())
    h.update(json.dumps(TABLE, sort_keys=True).encode())
    return h.hexdigest()


def _code(path: Path) -> str:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
