"""Triton's interpreter as a stand-in for a GPU: kernels run on CPU tensors, with the 3.6 interpreter's fp32 -> bf16 conversion
(it truncates) replaced by rounding to nearest even. Import this first, in a process of its own with TRITON_INTERPRET=1."""

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_convert = interpreter._convert_float


def _rounding(x, source, target, mode):
    if source == tl.float32 and target == tl.bfloat16:
        value = torch.from_numpy(np.ascontiguousarray(x).view(np.float32).copy())
        return value.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(x.shape)
    return _convert(x, source, target, mode)


interpreter._convert_float = _rounding
