"""What a recorded run is a run of: the code of the GPU forms, comments and docstrings left out. Gated DeltaNet keeps a digest of its own, and integer
digests (triton_digest.py) compute nothing that reaches a logprob."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

OPS = Path(__file__).parents[2] / "isoexec" / "ops"
_NAMES = ("triton*.py", "gpu.py", "hopper.py", "fa3.py", "deep_gemm.py", "rows.py", "provider.py")


def files() -> list[Path]:
    every = sorted(path for name in _NAMES for path in OPS.glob(f"*/{name}"))
    return [path for path in every if path.parent.name not in ("gdn", "_trace") and path.name != "triton_digest.py"]


def of(source: str) -> str:
    """Digest of a file's syntax tree."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            if isinstance(body[0].value.value, str):
                body[0].value.value = ""
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def digests() -> dict[str, str]:
    """File below isoexec/ops -> its digest."""
    return {path.relative_to(OPS).as_posix(): of(path.read_text()) for path in files()}
