"""Modules that hold Megatron's parameters while isoexec's ops compute.

A weight module's forward returns its weight: reading a parameter through the module call keeps the hooks of Megatron's
data-parallel wrapper (overlapped parameter gathering waits in a forward pre-hook) in force.
"""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

from isoexec.contract import ContractError, active_contract
from isoexec.ops import collective, embedding, matmul, norm, rope
from isoexec.runtimes.megatron import packing, settings


class ColumnWeight(ColumnParallelLinear):
    """[N / tp, K] bf16, rows sharded."""

    def forward(self) -> torch.Tensor:
        return self.weight


class RowWeight(RowParallelLinear):
    """[N, K / tp] bf16, columns sharded."""

    def forward(self) -> torch.Tensor:
        return self.weight


class ReplicatedWeight(torch.nn.Module):
    """[N, K] bf16 on every rank; its gradient summed over tensor-parallel ranks when they hold different tokens."""

    def __init__(self, config, rows: int, columns: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            config.init_method(self.weight)

    def forward(self) -> torch.Tensor:
        return self.weight


class NormWeight(torch.nn.Module):
    """[hidden_size], ones; replicated, its gradient summed over tensor-parallel ranks when they hold different tokens."""

    def __init__(self, config, hidden_size: int, eps: float, **unused):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self) -> torch.Tensor:
        return self.weight


class RMSNorm(NormWeight):
    """Final norm: [S, 1, D] bf16 -> [S, 1, D] bf16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm.rms_norm(x, self.weight, self.eps)


class ZeroCenteredRMSNorm(NormWeight):
    """Final norm whose factor is 1 + weight, the weight as the checkpoint has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return norm.zero_centered_rms_norm(x, self.weight, self.eps)


class NoAttention(torch.nn.Module):
    """Stands where a Megatron attention holds its kernel; the layer calls :func:`isoexec.ops.attention.varlen` itself."""

    def __init__(self, *args, **kwargs):
        super().__init__()


def tensor_parallel(group, sequence_parallel: bool) -> collective.TensorParallel | None:
    """The ops' view of a tensor-parallel group; None for a group of one."""
    return collective.TensorParallel(group, sequence_parallel) if group.size() > 1 else None


class VocabularyEmbedding(VocabParallelEmbedding):
    """ids [1, S] -> [1, S, D] bf16 (with sequence parallelism this rank's tokens, [S / tp, 1, D])."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        if input_.shape[0] != 1:
            raise ContractError(
                f"input_ids: expected one row of packed tokens, found {input_.shape[0]} rows; pack the sequences (PackedSeqParams, thd)"
            )
        tp = tensor_parallel(self.tp_group, self.reduce_scatter_embeddings)
        if tp is None:
            return embedding.embedding(input_[0], self.weight).unsqueeze(0)
        owner = input_[0] // self.num_embeddings_per_partition
        local = torch.where(owner == self.tp_group.rank(), input_[0] - self.vocab_start_index, 0)
        x = collective.rows_of_owners(embedding.embedding(local, self.weight), owner, tp=tp)
        return x.unsqueeze(1 if tp.sequence_parallel else 0)


class OutputLayer(ColumnParallelLinear):
    """[S, 1, D] bf16 -> fp32 logits [S, 1, V / tp]; with sequence parallelism the input is this rank's tokens."""

    def forward(self, input_, weight=None, runtime_gather_output=None, instead=None):
        """``instead``: function of (x [S, D] bf16, weight [V / tp, D] bf16) whose result takes the logits' place."""
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        tp = tensor_parallel(self.tp_group, self.sequence_parallel)
        if gather and tp is not None:
            raise ContractError(
                "output_layer: expected vocabulary-parallel logits, found gather_output=True; build the model with parallel_output=True"
            )
        x = collective.column_parallel_input(input_.flatten(0, 1), tp=tp)
        weight = self.weight if weight is None else weight
        return matmul.lm_head(x, weight).unsqueeze(1) if instead is None else instead(x, weight), None


class RopeTable(RotaryEmbedding):
    """cos and sin of a pack's tokens, computed once per micro-batch and shared by the layers: [2, T, rotating channels / 2] fp32.

    ``GPTModel`` asks for a sequence length and hands the answer back to ``forward``; here the answer is the tokens' positions,
    which restart with every sequence of the pack.
    """

    def __init__(self, kv_channels: int, rotary_percent: float, **kwargs):
        found = {name: kwargs.get(name) for name in ("rope_scaling", "seq_len_interpolation_factor")}
        if rotary_percent != 1.0 and active_contract().architecture not in settings.PARTIAL_ROPE:
            found["rotary_percent"] = rotary_percent
        if any(found.values()):
            raise ContractError(f"rope: expected the architecture's plain rotary embedding, found {found}; build the model without them")
        super().__init__(kv_channels, rotary_percent, **kwargs)
        self.rotary_dim, self.theta = int(kv_channels * rotary_percent), float(kwargs["rotary_base"])

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **unused):
        x = transformer_input if transformer_input is not None else transformer.input_tensor
        degree = transformer_config.tensor_model_parallel_size if transformer_config.sequence_parallel else 1
        tokens = torch.arange(x.shape[0] * degree, device=x.device)
        if packed_seq_params is None:
            return tokens
        starts = packing.bounds_of(packed_seq_params, len(tokens), x.device, anew=True).cu_seqlens.to(torch.int64)
        sequence = torch.bucketize(tokens, starts, right=True) - 1  # the last start <= token: skips empty sequences
        return tokens - starts[sequence]

    def forward(self, positions: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        return torch.stack(rope.rope_table(positions, self.rotary_dim, self.theta))


_REPLACEMENTS = {
    VocabParallelEmbedding: VocabularyEmbedding,
    RotaryEmbedding: RopeTable,
    ColumnParallelLinear: OutputLayer,
}


def replacement(cls: type) -> type:
    """The class built in place of ``cls`` under a contract (``ColumnParallelLinear`` being the output layer's)."""
    try:
        return _REPLACEMENTS[cls]
    except KeyError:
        raise ContractError(f"{cls.__name__}: the contract covers no such module; expected {[c.__name__ for c in _REPLACEMENTS]}") from None
