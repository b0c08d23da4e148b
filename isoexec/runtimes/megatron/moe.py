"""Routed and shared experts under a contract: Megatron's modules hold the parameters, the router's training terms hang on its weights."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from isoexec.models.qwen3_5 import MLP
from isoexec.models.qwen3_5_moe import SharedExpert
from isoexec.models.qwen3_moe import SparseMLP
from isoexec.ops import moe
from isoexec.ops._core import registry
from isoexec.runtimes.megatron.layers import mlp_submodules

Tensor = torch.Tensor


class RouterWeight(TopKRouter):
    """[E, D] bf16 on every rank, with sigmoid scores also a bias [E] fp32 that balances the experts' load."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.enable_expert_bias:  # integers: a cast of the model to bf16 passes them by, and no sum is rounded
            self.local_tokens_per_expert = self.local_tokens_per_expert.to(torch.int64)

    def forward(self) -> Tensor:
        return self.weight

    def count(self, experts: Tensor) -> None:
        """Add a training pass's tokens to the counts from which Megatron moves the bias when gradients are complete."""
        if self.enable_expert_bias and self.training and torch.is_grad_enabled():
            self.local_tokens_per_expert += moe.tokens_per_expert(experts, num_experts=self.num_experts)

    def on_route(self, logits: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """``weights`` themselves; in training with an auxiliary loss its gradient joins theirs, as upstream's router attaches it.

        The loss is that of the micro-batch: of all its tokens, wherever sequence parallelism put them. The pass that activation
        recomputation throws away runs without gradients and counts nothing.
        """
        self.count(experts)
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return weights
        counts = moe.tokens_per_expert(experts, num_experts=self.num_experts)
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)  # integers: any order
        with registry.beyond_logprob():
            loss = moe.load_balancing_loss(
                logits,
                counts,
                total_tokens=len(logits) * self.tp_cp_group.size(),
                top_k=self.topk,
                coefficient=coefficient,
                scoring=self.score_function,
            )
            return self.attach_and_log_load_balancing_loss(
                weights, coefficient, loss, "load_balancing_loss", self.tp_cp_group, valid_token_count=len(logits)
            )


def updated_expert_bias(counts: Tensor, bias: Tensor, rate: float, tp_dp_cp_group=None) -> Tensor:
    """Upstream's ``get_updated_expert_bias``, by the op.

    Args:
        counts: [layers, E] int64, tokens that this rank's experts got; summed over the group in place.
        bias: [layers, E] fp32.
        rate: of the update.
        tp_dp_cp_group: ranks that share the update; None: Megatron's own.

    Returns:
        [layers, E] fp32.
    """
    if tp_dp_cp_group is None:
        tp_dp_cp_group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(counts, group=tp_dp_cp_group)  # integers: any order
    with torch.no_grad():
        return torch.stack([moe.update_expert_bias(b, c, rate=rate) for b, c in zip(bias, counts, strict=True)])


class ExpertWeights(SequentialMLP):
    """gate_up E' times [2 F, D] and down E' times [D, F], bf16: the experts of this rank."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.config.tensor_model_parallel_size > 1:
            # A tensor-parallel rank has tokens of its own, and what it does not share out whole: its data-parallel ranks are those of experts.
            # Upstream says so only under expert parallelism; elsewhere each rank's copy would learn from its own tokens.
            for weight in self.parameters():
                weight.allreduce = False

    def forward(self) -> tuple[list[Tensor], list[Tensor]]:
        return [expert.linear_fc1() for expert in self.local_experts], [expert.linear_fc2() for expert in self.local_experts]


class SharedExpertWeights(SharedExpertMLP):
    """The shared expert: an ordinary tensor-parallel MLP, and its gate on every rank."""

    def forward(self) -> SharedExpert:
        return SharedExpert(gate_up=self.linear_fc1(), down=self.linear_fc2(), gate=self.gate_weight)


class UngatedSharedExpertWeights(SharedExpertMLP):
    """The shared expert where its output is added as it is."""

    def forward(self) -> MLP:
        return MLP(gate_up=self.linear_fc1(), down=self.linear_fc2())


class SparseWeights(MoELayer):
    """Router and experts of one layer."""

    def forward(self) -> SparseMLP:
        gate_up, down = self.experts()
        return SparseMLP(
            router=self.router(),
            gate_up=gate_up,
            down=down,
            top_k=self.router.topk,
            renormalize=not self.config.moe_router_pre_softmax,
            scoring=self.router.score_function,
            expert_bias=self.router.expert_bias,
            scale=self.config.moe_router_topk_scaling_factor or 1.0,
            n_group=self.config.moe_router_num_groups or 1,
            topk_group=self.config.moe_router_group_topk or 1,
        )

    @property
    def expert_parallel(self) -> moe.ExpertParallel | None:
        """The ops' view of the expert-parallel group, whose ranks bring tokens of their own; None for a group of one."""
        return moe.ExpertParallel(self.ep_group) if self.ep_group.size() > 1 else None


def sparse_mlp(shared: type[SharedExpertMLP] | None = None):
    """Builder of :class:`SparseWeights`; ``shared``: class of its shared expert."""
    return functools.partial(
        SparseWeights,
        submodules=MoESubmodules(
            router=RouterWeight,
            experts=functools.partial(ExpertWeights, submodules=mlp_submodules()),
            shared_experts=functools.partial(shared, submodules=mlp_submodules()) if shared else None,
        ),
    )
