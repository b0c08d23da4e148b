"""What a recorded run is a run of: the code that computes on a GPU, comments and docstrings left out.

That is every module that an op names for a GPU, `logprob/of_hidden.py`, and what they import of the op library, so that a new one is not
forgotten. Gated DeltaNet keeps a digest of its own, and what computes nothing that reaches a logprob (integer digests, declarations, checks) is
left out.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
from pathlib import Path

from isoexec.ops._core import registry

OPS = Path(__file__).parents[2] / "isoexec" / "ops"
_OTHER_FAMILIES = ("gdn", "_trace")
_COMPUTES_NOTHING = ("__init__.py", "checks.py", "expect.py", "registry.py", "triton_digest.py", "digest.py")
#: No op: a composition of ops with a gradient of its own.
_COMPOSED = ("isoexec.ops.logprob.of_hidden",)


def _path(module: str) -> Path | None:
    """File of a module of the op library; None for anything else."""
    if not module.startswith("isoexec.ops."):
        return None
    path = OPS.joinpath(*module.split(".")[2:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def _imported(path: Path):
    """Modules that ``path`` names when it is imported; what a function imports serves one case of several."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def files() -> list[Path]:
    for package in OPS.glob("*/__init__.py"):
        importlib.import_module(f"isoexec.ops.{package.parent.name}")
    named = [d.implementations["cuda"].partition(":")[0] for d in registry.declarations().values() if "cuda" in d.implementations]
    waiting, found = [_path(module) for module in (*named, *_COMPOSED)], set()
    while waiting:
        path = waiting.pop()
        if path and path not in found and path.parent.name not in _OTHER_FAMILIES:
            found.add(path)
            waiting += map(_path, _imported(path))
    return sorted(path for path in found if path.name not in _COMPUTES_NOTHING)


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
