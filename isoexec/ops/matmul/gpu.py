"""Matrix products on a GPU. Architecture and contract pick the kernel, for every case and rank alike.

One leaf: DeepGEMM on sm_90, the Triton form elsewhere. Several leaves (row-parallel, a contract that claims tensor parallelism): the Triton form,
on every rank, whether it owns one leaf or all of them; on sm_90 many rows take the form of hopper.py, which has its bits.
"""

from __future__ import annotations

import functools

import torch

from isoexec.ops.collective.reference import all_gather, group_size, own_rows, sum_over_ranks
from isoexec.ops.matmul import deep_gemm, hopper
from isoexec.ops.matmul import triton as portable
from isoexec.ops.matmul.checks import check_leaves


@functools.lru_cache(maxsize=None)
def uses_deep_gemm(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def product(x, weight, dtype, bias=None):
    """``x`` [M, K] times ``weight`` [N, K] transposed, one leaf -> [M, N] in ``dtype``."""
    # DeepGEMM stores 16 bytes of a row at a time. A narrow weight is nobody's shard of a wide one.
    if not uses_deep_gemm(x.device) or weight.shape[0] * dtype.itemsize % 16:
        return portable.product(x, weight, dtype, bias)
    y = deep_gemm.product(x, weight, dtype if bias is None else torch.float32)
    return y if bias is None else portable.tree(y.unsqueeze(0), dtype, bias)


def tree_product(x, weight, dtype, bias, leaves):
    """``x`` [M, K] times ``weight`` [N, K] transposed, by ``leaves`` parts of K -> [M, N] in ``dtype``."""
    if x.shape[0] > hopper.FEW_ROWS and uses_deep_gemm(x.device) and hopper.fits(x.shape[1], leaves):
        return hopper.product(x, weight, dtype, bias, leaves)
    return portable.product(x, weight, dtype, bias, leaves)


# Gradients promise determinism, not the schedule's bits: bf16 operands, fp32 accumulation.


def _gradients_by_deep_gemm(grad, other) -> bool:
    return uses_deep_gemm(grad.device) and grad.shape[0] > 0 and not any(n % 8 for n in (*grad.shape[1:], *other.shape[1:]))


def input_gradient(grad, weight, dtype):
    """``grad`` [M, N] times ``weight`` [N, K] -> [M, K]."""
    grad = grad.to(dtype)
    return deep_gemm.input_gradient(grad, weight) if _gradients_by_deep_gemm(grad, weight) else grad @ weight


def weight_gradient(grad, x, dtype):
    """``grad`` [M, N] transposed times ``x`` [M, K] -> [N, K]."""
    grad = grad.to(dtype)
    return deep_gemm.weight_gradient(grad, x) if _gradients_by_deep_gemm(grad, x) else grad.mT @ x


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, leaves, tp, dtype):
        """``leaves``: of the whole product; this rank has its share."""
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.bias_dtype = tp, None if bias is None else bias.dtype
        flat = x.flatten(0, -2)
        if leaves == 1:
            y = product(flat, weight, dtype, bias)
        elif tp is None:
            y = tree_product(flat, weight, dtype, bias, leaves)
        else:
            y = sum_over_ranks(tree_product(flat, weight, torch.float32, None, leaves // group_size(tp)), tp.group)
            if tp.sequence_parallel:
                y = own_rows(y, tp.group)
            y = portable.tree(y.unsqueeze(0), dtype, bias)
        # Sequence parallelism keeps a part of the rows, so there x is [T, K].
        return y if tp is not None and tp.sequence_parallel else y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = g.float().sum(0).to(ctx.bias_dtype)
        g = g.to(x.dtype)
        if ctx.tp is not None and ctx.tp.sequence_parallel:
            g = all_gather(g, ctx.tp.group).flatten(0, 1)
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(g, weight, x.dtype).view_as(x)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_gradient(g, x.flatten(0, -2), weight.dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def linear(x, weight, bias=None):
    return _Linear.apply(x, weight, bias, 1, None, x.dtype)


def lm_head(x, weight):
    return _Linear.apply(x, weight, None, 1, None, torch.float32)


def row_parallel_linear(x, weight, *, leaves, tp=None, bias=None):
    ranks = group_size(tp)
    check_leaves(x.shape[-1] * ranks, leaves, ranks)
    return _Linear.apply(x, weight, bias, leaves, tp if ranks > 1 else None, x.dtype)
