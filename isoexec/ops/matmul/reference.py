"""Matrix products of the CPU backend: fp32 tiles of one shape, [32, K] x [K, 64], so that the BLAS picks one order of additions.

A wider call is faster, but its blocking may follow the number of rows or columns. Tiles are padded with zeros and batched: a batched
product gives every tile the bits of that tile alone (tests/ops/test_matmul_cpu.py shows it for batch, position, layout and threads). Only
a batch of one tile is left out: threads may share out its K.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from isoexec.contract import ContractError
from isoexec.ops._core.rowsum import tree_sum
from isoexec.ops.collective.reference import all_gather, group_size, own_rows, sum_over_ranks
from isoexec.ops.matmul.checks import check_leaves

ROWS, COLUMNS = 32, 64
# Weights become fp32 a panel at a time: the copy stays in cache, and a vocabulary head does not double in memory.
_PANEL_ELEMENTS = 1 << 20
_GRADIENT_ELEMENTS = 1 << 24


def product(x: torch.Tensor, weight: torch.Tensor, leaves: int = 1) -> torch.Tensor:
    """``x`` [M, K] times ``weight`` [N, K] transposed, both exact in fp32 -> [M, N] fp32: each of ``leaves`` equal parts of K in ascending K,
    then the tree over them."""
    if torch.get_float32_matmul_precision() != "highest":
        raise ContractError(
            f"matmul: float32_matmul_precision is {torch.get_float32_matmul_precision()!r}, the schedule needs 'highest'; "
            "remove the call of torch.set_float32_matmul_precision"
        )
    if x.shape[1] == 1:  # a batched product of one term keeps or drops the sign of a zero by the size of its batch
        x, weight = pad(x, (0, 1)), pad(weight, (0, 1))
    (M, K), N = x.shape, weight.shape[0]
    row_tiles, k = -(-M // ROWS), K // leaves
    x = pad(x.float(), (0, 0, 0, -M % ROWS)).reshape(row_tiles, ROWS, leaves, k).transpose(1, 2)
    out = x.new_empty(row_tiles, ROWS, N)
    panel = max(_PANEL_ELEMENTS // max(K, 1) // COLUMNS, 1) * COLUMNS
    for first in range(0, N, panel):
        w = weight[first : first + panel].float()
        columns, tiles = w.shape[0], -(-w.shape[0] // COLUMNS)
        w = pad(w, (0, 0, 0, -columns % COLUMNS)).view(tiles, COLUMNS, leaves, k).permute(2, 0, 3, 1).reshape(-1, k, COLUMNS)
        for rows, target in zip(x, out[:, :, first : first + panel]):
            y = batched(rows.unsqueeze(1).expand(leaves, tiles, ROWS, k).reshape(-1, ROWS, k), w)
            y = tree_sum(y.view(leaves, tiles, ROWS, COLUMNS)).transpose(0, 1)
            target.copy_(y.reshape(ROWS, -1)[:, :columns])
    return out.view(row_tiles * ROWS, N)[:M]


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``torch.bmm`` of fp32 tiles [B, ROWS, K] and [B, K, COLUMNS] whose bits follow from a tile alone, also where B is 1."""
    return torch.bmm(x, w) if len(x) != 1 else torch.bmm(x.expand(2, -1, -1), w.expand(2, -1, -1))[:1]


# Gradients promise determinism, not the schedule's bits: plain fp32 products (far faster than bf16 ones on a CPU).


def input_gradient(grad, weight, dtype):
    """``grad`` [M, N] times ``weight`` [N, K] -> [M, K]; a large weight becomes fp32 a part at a time."""
    rows = max(_GRADIENT_ELEMENTS // weight.shape[1], 1)
    total = grad[:, :rows].float() @ weight[:rows].float()
    for first in range(rows, len(weight), rows):
        total.addmm_(grad[:, first : first + rows].float(), weight[first : first + rows].float())
    return total.to(dtype)


def weight_gradient(grad, x, dtype):
    """``grad`` [M, N] transposed times ``x`` [M, K] -> [N, K]."""
    return (grad.mT.float() @ x.float()).to(dtype)


class _Linear(torch.autograd.Function):
    """Leaves 1 and no group: ``linear`` and ``lm_head``. Otherwise one rank's part of a row-parallel product."""

    @staticmethod
    def forward(ctx, x, weight, bias, leaves, tp, dtype):
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.bias_dtype = tp, None if bias is None else bias.dtype
        y = product(x.flatten(0, -2), weight, leaves)
        if tp is not None:
            y = sum_over_ranks(y, tp.group)
            if tp.sequence_parallel:
                y = own_rows(y, tp.group)
        if bias is not None:
            y = y + bias.float()
        # Sequence parallelism keeps a part of the rows, so there x is [T, K].
        return y.to(dtype) if len(y) != x.shape[:-1].numel() else y.to(dtype).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        g = grad.flatten(0, -2).float()
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = g.sum(0).to(ctx.bias_dtype)
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
    return _Linear.apply(x, weight, bias, leaves // ranks, tp, x.dtype)
