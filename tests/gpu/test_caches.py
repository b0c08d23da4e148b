"""Compiled kernels travel: with the caches of another machine's run, nothing is compiled again."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_RUN = """
import torch
from isoexec.ops import matmul, norm
x = torch.randn(300, 1024, device="cuda").bfloat16()
w = torch.randn(256, 1024, device="cuda").bfloat16()
matmul.linear(x, w), matmul.row_parallel_linear(x, w, leaves=8), norm.rms_norm(x, w[0], 1e-6)
torch.cuda.synchronize()
"""


def _files(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*") if path.is_file() and path.suffix in (".cubin", ".so", ".ptx")}


def test_compiled_kernels_travel(tmp_path, hardware):
    there, here = tmp_path / "there", tmp_path / "here"

    def run(root):
        caches = dict(TRITON_CACHE_DIR=str(root / "triton"), DG_JIT_CACHE_DIR=str(root / "deep_gemm"))
        subprocess.run([sys.executable, "-c", _RUN], env={**os.environ, **caches}, check=True, timeout=300)
        return _files(root)

    compiled = run(there)
    kinds = {path.parts[0] for path in compiled}
    assert kinds == {"triton", "deep_gemm"} and any("tree_product_kernel" in path.name for path in compiled)
    shutil.copytree(there, here)
    shutil.rmtree(there)
    assert run(here) == compiled
