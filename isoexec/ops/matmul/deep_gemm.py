"""Matrix products by DeepGEMM's bf16 kernels (sm_90): one accumulator per output, K ascending, so a row has the same bits at every M.

Only the compiled extension is loaded, from the pinned provider; its kernels are compiled by nvcc on first use of a shape.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import shutil
import threading
from pathlib import Path

import torch

from isoexec.contract import ContractError
from isoexec.ops._core.provider import provided
from isoexec.ops.matmul.triton import copyable


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


_thread = threading.local()


def _call(name: str, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The library calls the driver, which wants a context on the thread: a thread of autograd gets one by a call of the runtime."""
    if out.numel():
        if not getattr(_thread, "has_context", False):
            torch.cuda.Event().record()
            _thread.has_context = True
        getattr(library(), name)(copyable(left), copyable(right), out)
    return out


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [M, K] bf16 times ``weight`` [N, K] bf16 transposed, fp32 accumulation -> [M, N] in ``dtype`` (bf16 or fp32)."""
    return _call("bf16_gemm_nt", x, weight, x.new_empty(x.shape[0], weight.shape[0], dtype=dtype))


def input_gradient(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``grad`` [M, N] bf16 times ``weight`` [N, K] bf16 -> [M, K] bf16; N and K are multiples of 8."""
    return _call("bf16_gemm_nn", grad, weight, grad.new_empty(grad.shape[0], weight.shape[1]))


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``grad`` [M, N] bf16 transposed times ``x`` [M, K] bf16 -> [N, K] bf16; N and K are multiples of 8, M is any."""
    return _call("bf16_gemm_tn", grad, x, grad.new_empty(grad.shape[1], x.shape[1]))
