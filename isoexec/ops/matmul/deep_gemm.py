"""Matrix products by DeepGEMM's bf16 kernels (sm_90): one accumulator per output, K ascending, so a row has the same bits at every M.

Only the compiled extension is loaded, from the pinned provider; its kernels are compiled by nvcc on first use of a shape.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import shutil
from pathlib import Path

import torch

from isoexec.contract import ContractError
from isoexec.ops._core.provider import provided


@functools.lru_cache(maxsize=None)
def library():
    """The extension module, initialised.

    Raises:
        ContractError: the provider is missing or differs, or there is no CUDA compiler.
    """
    root = provided("deep_gemm")
    (path,) = root.glob("_C.*.so")
    loader = importlib.machinery.ExtensionFileLoader("isoexec_deep_gemm._C", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(loader.name, path, loader=loader))
    loader.exec_module(module)
    module.init(str(root), str(_cuda_home()))
    return module


def _cuda_home() -> Path:
    nvcc = shutil.which("nvcc")
    for home in (os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"):
        if home and Path(home, "bin", "nvcc").exists():
            return Path(home)
    raise ContractError("provider deep_gemm: no CUDA compiler (nvcc) found; install the CUDA toolkit or set CUDA_HOME")


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [M, K] bf16 times ``weight`` [N, K] bf16 transposed, fp32 accumulation -> [M, N] in ``dtype`` (bf16 or fp32)."""
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype, device=x.device)
    if out.numel():
        library().bf16_gemm_nt(x, weight, out)
    return out

