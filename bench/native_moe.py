"""vLLM's fused experts as it runs them in bf16 (its Triton kernel, its default configuration, its align op), without importing vLLM.

A folder holds ``vllm/_moe_C.abi3.so`` and ``vllm/model_executor/layers/fused_moe/fused_moe.py`` of the release. The functions are taken from that
file by name. Between the two products our silu_mul kernel stands for vLLM's, and torch.sum for moe_sum, which calls it for eight experts a token.
"""

from __future__ import annotations

import ast
import importlib.util
import tempfile
import types
from pathlib import Path

import torch
import triton

from isoexec.ops.activation.triton import silu_mul

_NAMES = ("write_zeros_to_output", "fused_moe_kernel", "invoke_fused_moe_triton_kernel", "get_default_config")
_HEAD = """from types import SimpleNamespace
from typing import Any
import torch, triton
import triton.language as tl
envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
current_platform = SimpleNamespace(is_rocm=lambda: False)
"""


def load(folder) -> types.ModuleType:
    """The functions of vLLM's module, and its compiled ops in ``torch.ops._moe_C``."""
    root = Path(folder, "vllm")
    torch.ops.load_library(root / "_moe_C.abi3.so")
    lines = (root / "model_executor/layers/fused_moe/fused_moe.py").read_text().splitlines()
    found = {node.name: node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.FunctionDef)}
    parts = []
    for name in _NAMES:
        node = found[name]
        parts.append("\n".join(lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno]))
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:  # triton.jit reads its source from a file
        file.write("\n\n\n".join([_HEAD, *parts]))
    spec = importlib.util.spec_from_file_location("native_fused_moe", file.name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def align(experts, block, num_experts):
    """(sorted pair ids, expert of each block, padded count) as vLLM allocates them."""
    pairs = experts.numel()
    most = min(pairs * block, pairs + num_experts * (block - 1)) if pairs < num_experts else pairs + num_experts * (block - 1)
    ints = lambda n: torch.empty(n, dtype=torch.int32, device=experts.device)  # noqa: E731
    out = ints(most), ints(triton.cdiv(most, block)), ints(1)
    torch.ops._moe_C.moe_align_block_size(experts, num_experts, block, *out, None)
    return out


def fused_experts(module, x, gate_up, down, weights, experts):
    """x [T, D] -> [T, D]; ``experts`` int32, as vLLM's router gives them."""
    (T, D), (E, F2, _), k = x.shape, gate_up.shape, experts.shape[1]
    config = module.get_default_config(T, E, F2 // 2, D, k, None)
    plan = align(experts, config["BLOCK_SIZE_M"], E)
    first = torch.empty(T, k, F2, dtype=x.dtype, device=x.device)
    second = torch.empty(T, k, D, dtype=x.dtype, device=x.device)
    plain = dict(use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False)
    kind = triton.language.bfloat16
    module.invoke_fused_moe_triton_kernel(x, gate_up, first, None, None, weights, *plan, False, k, config, compute_type=kind, **plain)
    h = silu_mul(first.view(T * k, F2))
    module.invoke_fused_moe_triton_kernel(h, down, second, None, None, weights, *plan, True, 1, config, compute_type=kind, **plain)
    return second.sum(1)


def topk_softmax(logits, k):
    """(weights [T, k] fp32, experts [T, k] int32), renormalised."""
    T = logits.shape[0]
    weights = torch.empty(T, k, dtype=torch.float32, device=logits.device)
    experts, rows = (torch.empty(T, k, dtype=torch.int32, device=logits.device) for _ in range(2))
    torch.ops._moe_C.topk_softmax(weights, experts, rows, logits, True, None)
    return weights, experts
