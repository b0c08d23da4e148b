"""Token embedding on a GPU. The gather moves bytes; the gradient adds a token's rows in token order, without atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from isoexec.ops._core.triton_math import COMPILE

_BLOCK = 256


@triton.jit
def grad_kernel(grad, order, ids, first, out, count, segments, D: tl.constexpr, BLOCK: tl.constexpr):
    """One distinct id and BLOCK channels per program: rows ``order[first[s] : first[s + 1]]`` of ``grad``, ascending, summed in fp32."""
    s = tl.program_id(0)
    if s < tl.load(segments):
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        start = tl.load(first + s)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for i in range(start, tl.load(first + s + 1)):
            total += tl.load(grad + tl.load(order + i) * D + c, mask=c < D, other=0.0).to(tl.float32)
        tl.store(out + tl.load(ids + start) * D + c, total.to(out.dtype.element_ty), mask=c < D)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight):
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        D, count = ctx.shape[1], ids.shape[0]
        out = torch.zeros(ctx.shape, dtype=ctx.dtype, device=grad.device)
        if count:
            # No host read and no host scalar on the way to the device: the number of distinct ids stays there, the grid covers the most there can be.
            sorted_ids, order = ids.to(torch.int64).sort(stable=True)
            starts = torch.ones(count, dtype=torch.bool, device=ids.device)
            starts[1:] = sorted_ids[1:] != sorted_ids[:-1]
            segment = starts.cumsum(0)
            first = torch.full((count + 1,), count, dtype=torch.int64, device=ids.device)
            first.scatter_(0, (segment - 1).masked_fill(~starts, count), torch.arange(count, device=ids.device))
            first[count:].fill_(count)  # first[count] = count would copy a scalar from the host, which a capture refuses
            # Entries past the last segment hold count, as does the end of the last one.
            grad_kernel[count, triton.cdiv(D, _BLOCK)](
                grad.contiguous(), order, sorted_ids, first, out, count, segment[-1:], D, BLOCK=_BLOCK, num_warps=2, **COMPILE
            )
        return None, out


def embedding(ids, weight):
    return _Embedding.apply(ids, weight)
