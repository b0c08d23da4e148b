"""Logprobs of generated tokens: from a micro-batch's logits, one function per arm, or from its hidden states, which needs no logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from isoexec.contract import ExecutionContract
from isoexec.ops import logprob
from isoexec.ops.logprob.of_hidden import of_hidden
from isoexec.runtimes.megatron.modules import tensor_parallel
from isoexec.runtimes.megatron.packing import MicroBatch

#: (logits [B, S, V / tp] fp32, micro-batch, temperature, with rows) -> (logprobs [N] fp32, log-probability rows [N, vocab] fp32 or None)
Scorer = Callable[[torch.Tensor, MicroBatch, float, bool], tuple[torch.Tensor, torch.Tensor | None]]


def scorer(contract: ExecutionContract | None, vocab_size: int, group, sequence_parallel: bool) -> Scorer:
    """The arm's logprob computation.

    Args:
        contract: of this process, or None for the native arm.
        vocab_size: entries that exist; a model may hold padding beyond.
        group: tensor-parallel process group.
        sequence_parallel: as the model has it.
    """
    if contract is None:
        return lambda *arguments: _native(vocab_size, *arguments)
    sizes = {"vocab_size": vocab_size, "vocab_block": contract.numerics.vocab_block}
    tp = tensor_parallel(group, sequence_parallel)

    def score(logits, batch, temperature, with_rows):
        chosen = logits.flatten(0, 1).index_select(0, batch.rows)
        chosen = logprob.scale_by_temperature(chosen, scalar(temperature, chosen.device))
        logprobs = logprob.token_logprob(chosen, batch.targets, tp=tp, **sizes)
        if not with_rows:
            return logprobs, None
        whole = chosen.detach() if tp is None else gather_from_tensor_model_parallel_region(chosen.detach(), group=group)
        return logprobs, logprob.log_softmax(whole, **sizes)[:, :vocab_size]

    return score


def hidden_scorer(contract: ExecutionContract, vocab_size: int, group, sequence_parallel: bool):
    """(x [N, D] bf16 hidden states, weight [V / tp, D], tokens [N], temperature, see=None) -> logprobs [N] fp32, those of :func:`scorer`.

    Args:
        contract, vocab_size, group, sequence_parallel: as for :func:`scorer`.
    """
    sizes = {"vocab_size": vocab_size, "vocab_block": contract.numerics.vocab_block, "tp": tensor_parallel(group, sequence_parallel)}

    def score(x, weight, tokens, temperature, see=None):
        return of_hidden(x, weight, tokens, scalar(temperature, x.device), see=see, **sizes)

    return score


def in_place_of_logits(function):
    """Megatron's output processor with which a model gives ``function(x [S, D] bf16, weight [V / tp, D] bf16)``.

    It is called through the output layer's module, for the hooks of that layer's parameters.
    """

    def process(*, hidden_states, output_layer, output_weight, **unused) -> torch.Tensor:
        return output_layer(hidden_states, weight=output_weight, instead=function)[0]

    return process


def scalar(temperature: float, device) -> torch.Tensor:
    """An fp32 tensor on both sides: a Python float would divide in another precision."""
    return torch.tensor(temperature, dtype=torch.float32, device=device)


def _native(vocab_size: int, logits, batch: MicroBatch, temperature: float, with_rows: bool):
    chosen = logits.flatten(0, 1).index_select(0, batch.rows)[:, :vocab_size].float() / temperature
    rows = torch.log_softmax(chosen, -1)
    return rows.gather(1, batch.targets.unsqueeze(1)).squeeze(1), rows.detach() if with_rows else None
