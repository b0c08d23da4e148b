"""Mixture of experts on a GPU: the public ops over the Triton kernels. No host read on the way, so that a decode step can be captured."""

from __future__ import annotations

import torch
import torch.distributed as dist

from isoexec.contract import ContractError
from isoexec.ops.activation.triton import silu_mul, silu_mul_grad
from isoexec.ops.matmul.gpu import lm_head
from isoexec.ops.moe import triton_combine, triton_grouped, triton_plan
from isoexec.ops.moe.parallel import gather_rows, local_groups, sum_partials
from isoexec.ops.moe.triton_route import Route


def router_logits(x, weight):
    return lm_head(x, weight)  # the same product: bf16 operands, fp32 accumulation, no rounding to bf16


def route(logits, *, top_k, renormalize, scoring="softmax", expert_bias=None, scale=1.0, n_group=1, topk_group=1):
    return Route.apply(logits, top_k, renormalize, scoring == "sigmoid", expert_bias, scale, n_group, topk_group)


class _Experts(torch.autograd.Function):
    """values [T, k, D]; the weights are two stacked tensors, or E' of [2 F, D] and then E' of [D, F]."""

    @staticmethod
    def forward(ctx, x, experts, first, spread, *weights):
        """``first``: first expert held; ``spread``: experts that the pairs are spread over, of all ranks."""
        gate_up, down = _stacks(weights)
        held, (T, k), D = len(gate_up), experts.shape, x.shape[1]
        values = (torch.empty if held == spread else torch.zeros)(T * k, D, dtype=x.dtype, device=x.device)
        gate_up_rows, ctx.first = None, first
        if T:
            form = triton_grouped.form_for(T * k, spread)
            plan = triton_plan.make(experts, first, held, form.gate_up.rows)
            x = x if x.stride(-1) == 1 else x.contiguous()
            h, gate_up_rows = triton_grouped.gate_up(x, gate_up, plan, form.gate_up, save=any(ctx.needs_input_grad))
            triton_grouped.rows(h, down, plan, form.down, scatter=values)
        ctx.save_for_backward(x, experts, gate_up_rows, *weights)
        return values.view(T, k, D)

    @staticmethod
    def backward(ctx, grad):
        x, experts, gate_up_rows, *weights = ctx.saved_tensors
        if not len(x):
            return torch.zeros_like(x), None, None, None, *(torch.zeros_like(w) for w in weights)
        gate_up, down = _stacks(weights)
        tiles = triton_grouped.GRADIENT
        plan = triton_plan.make(experts, ctx.first, len(gate_up), tiles.rows)  # other tiles, the same rows
        x, grad = x.contiguous(), grad.contiguous().view(-1, grad.shape[-1])
        grad_h = triton_grouped.rows(grad, down, plan, tiles, nn=True, gather=True)
        grad_gate_up_rows = silu_mul_grad(grad_h, gate_up_rows)
        grad_x = grad_gate_up = grad_down = None
        if ctx.needs_input_grad[0]:
            grad_x = triton_grouped.token_grad(triton_grouped.rows(grad_gate_up_rows, gate_up, plan, tiles, nn=True), plan)
        if any(ctx.needs_input_grad[4:]):
            grad_down = triton_grouped.weight_grad(grad, silu_mul(gate_up_rows), plan, triton_grouped.BY_PAIR, triton_grouped.SORTED)
            grad_gate_up = triton_grouped.weight_grad(grad_gate_up_rows, x, plan, triton_grouped.SORTED, triton_grouped.BY_TOKEN)
            if len(weights) == 2 and weights[0].dim() == 3:
                return grad_x, None, None, None, grad_gate_up, grad_down
            return grad_x, None, None, None, *grad_gate_up.unbind(), *grad_down.unbind()
        return grad_x, None, None, None, *(None for _ in weights)


def _stacks(weights):
    """(gate_up [E', 2 F, D], down [E', D, F]), contiguous."""
    if len(weights) == 2 and weights[0].dim() == 3:
        return [w.contiguous() for w in weights]
    half = len(weights) // 2
    return [_stack(weights[:half]), _stack(weights[half:])]


def _stack(weights):
    """One tensor of equally spaced neighbours in memory without a copy (parameters of one buffer are such), of others by a copy."""
    first, size = weights[0], weights[0].numel() * weights[0].element_size()
    if all(w.is_contiguous() and w.data_ptr() == first.data_ptr() + i * size for i, w in enumerate(weights)):
        if first.untyped_storage().nbytes() >= first.storage_offset() * first.element_size() + size * len(weights):
            return first.detach().as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(weights)


def expert_mlp(x, experts, gate_up, down, *, ep=None):
    held, ranks, rank = len(gate_up), 1, 0
    if ep is not None:
        ranks, rank = dist.get_world_size(ep.group), dist.get_rank(ep.group)
    every = [(w,) if isinstance(w, torch.Tensor) else tuple(w) for w in (gate_up, down)]
    F2, D = every[0][0].shape[-2:]
    if x.dtype != torch.bfloat16 or x.shape[-1] != D or F2 % 32 or D % 16:
        raise ContractError(
            f"op moe.expert_mlp: x {x.dtype} {tuple(x.shape)}, gate_up [.., {F2}, {D}]; expected bf16, one hidden size, and widths that are "
            "multiples of 16"
        )
    return _Experts.apply(x, experts, rank * held, held * ranks, *every[0], *every[1])


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, weights, experts, shared, first_expert, groups, experts_per_group, rows, ep):
        ctx.ep, ctx.rows = ep, rows
        ctx.save_for_backward(values, weights)
        place = values, weights, experts
        if ep is None:
            return triton_combine.total(*place, shared, first_expert, groups, experts_per_group, values.dtype)
        total = sum_partials(triton_combine.total(*place, None, first_expert, groups, experts_per_group, torch.float32), ep, rows)
        return (total if shared is None else total + shared.float()).to(values.dtype)

    @staticmethod
    def backward(ctx, grad):
        values, weights = ctx.saved_tensors
        every = grad if ctx.rows is None else gather_rows(grad, ctx.ep, ctx.rows)
        grads = triton_combine.gradients(every, values, weights)
        return *grads, None, grad if ctx.needs_input_grad[3] else None, None, None, None, None, None


def combine(values, weights, experts, shared=None, *, num_experts, combine_groups, rows=None, ep=None):
    first_expert, groups = local_groups(num_experts, combine_groups, ep)
    return _Combine.apply(values, weights, experts, shared, first_expert, groups, num_experts // combine_groups, rows, ep)


def tokens_per_expert(experts, *, num_experts, valid=None):
    flat = experts if valid is None else experts.masked_fill(~valid.unsqueeze(-1), num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)  # integers: atomics add them in any order
    return counts.index_add_(0, flat.flatten(), torch.ones_like(flat).flatten())[:num_experts]
