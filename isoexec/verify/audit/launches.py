"""Kernels that torch does not dispatch: Triton's own launches, and what only a profile of the device shows."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import isoexec.ops
from isoexec.contract import ContractError

_spec = importlib.util.find_spec("triton")
#: Folder of the installed Triton, whose frames are no call sites; empty-handed where there is none.
TRITON = os.path.join(os.path.dirname(_spec.origin), "") if _spec and _spec.origin else "\0"

#: Names in a profile of kernels that are launched past the dispatcher and are not Triton's, and whose they are.
ALLOWED = (
    (r"deep_gemm::", "DeepGEMM: op family matmul"),
    (r"flash::|FlashAttn", "FlashAttention 3: op family attention"),
    (r"Mem(cpy|set)\b", "bytes"),
    (r"nccl\w*Kernel_(AllGather|SendRecv|Broadcast)", "collectives that move bytes"),
)
#: Triton kernels of vLLM that compute no float, by their whole names, and what they do.
MOVING = {
    "_compute_slot_mapping_kernel": "slots of the cache, integers",
    "_zero_kv_blocks_kernel": "zeros in blocks of the cache before they are written",
    "batch_memcpy_kernel": "states of Gated DeltaNet, moved as bytes",
}


@contextlib.contextmanager
def triton_launches(report: Callable[[str], None]):
    """Call ``report`` with the name of every Triton kernel before its launch. Without Triton there is nothing to watch.

    Raises:
        ContractError: kernels are interpreted, which calls no launch hook.
    """
    if _spec is None:
        yield
        return
    from triton import knobs

    if knobs.runtime.interpret:
        raise ContractError("TRITON_INTERPRET: expected unset, found 1: an interpreted kernel calls no launch hook; unset it for the audit")

    def hook(metadata):
        report(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


@contextlib.contextmanager
def device_kernels(report: Callable[[str, int], None]):
    """Profile the device inside the block; afterwards call ``report(name, count)`` for every kernel that is neither dispatched by torch nor
    allowed by name. Without a GPU there is nothing to profile."""
    if not torch.cuda.is_available():
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        yield
        torch.cuda.synchronize()
    events = profiled.events()
    ran = Counter(e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA)
    dispatched = Counter(k.name for e in events if e.name.startswith(("aten::", "c10d::")) for k in e.kernels)
    for name, count in unexplained(ran, dispatched).items():
        report(name, count)


def unexplained(ran: Counter[str], dispatched: Counter[str]) -> dict[str, int]:
    """Launches by kernel name that neither torch's dispatcher (which the dispatch mode watches) nor the allow-lists account for."""
    named = triton_kernels() | MOVING.keys()
    return {
        name: count
        for name, count in (ran - dispatched).items()
        if name not in named and not any(re.search(pattern, name) for pattern, _ in ALLOWED)
    }


@functools.cache
def triton_kernels() -> frozenset[str]:
    """Names of the Triton kernels of the op library, read from its sources; the launch hook checks that ops launch them."""
    folder = Path(isoexec.ops.__file__).parent
    return frozenset(name for file in folder.rglob("*.py") for name in _jitted(ast.parse(file.read_bytes())))


def _jitted(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield node.name
