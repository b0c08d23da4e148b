"""Temperature, log-softmax and the draw, from vLLM's sampling metadata.

The logprobs returned are those of the distribution that is sampled: softmax(logits / T) over the whole vocabulary. A greedy row (T = 0)
takes the first maximum of its logits; settings.check_request refuses logprobs for it: a greedy token is not drawn from a distribution.
"""

from __future__ import annotations

import torch

from isoexec.contract import ContractError, ExecutionContract
from isoexec.ops import logprob, sampling
from isoexec.runtimes.vllm import step


def sample(contract: ExecutionContract, logits, metadata):
    """Sample one token per row.

    Args:
        contract: the contract.
        logits: [T, V] fp32.
        metadata: vLLM ``SamplingMetadata``.

    Returns:
        (tokens [T] int64, logprobs [T, V] fp32, of the distribution sampled).

    Raises:
        ContractError: logits that were rounded.
    """
    if logits.dtype != torch.float32:
        raise ContractError(f"logprob.log_softmax: logits: expected torch.float32, found {logits.dtype}; something rounded them on the way")
    rows, vocab_size = logits.shape
    with step.executing():
        greedy, temperature = _temperatures(metadata, logits)
        scaled = logprob.scale_by_temperature(logits, temperature)
        logprobs = logprob.log_softmax(scaled, vocab_size=vocab_size, vocab_block=contract.numerics.vocab_block)
        drawn = sampling.draw(logprobs, [metadata.generators.get(row) for row in range(rows)])
        if greedy is not None:
            drawn = torch.where(greedy, sampling.first_maximum(logits), drawn)
    step.end()
    return drawn, logprobs


def _temperatures(metadata, logits):
    """(greedy [T] bool or None where no row is, temperature [T] fp32, more than 0)."""
    if metadata.all_random:
        return None, metadata.temperature
    temperature = metadata.temperature
    if temperature is None:  # every row is greedy
        temperature = torch.zeros(logits.shape[0], dtype=torch.float32, device=logits.device)
    return sampling.split_greedy(temperature)


def raw_logprobs(contract: ExecutionContract, logits):
    """Logprobs [T, V] fp32 of ``logits`` [T, V] fp32 at temperature 1: prompt logprobs."""
    with step.executing():
        return logprob.log_softmax(logits, vocab_size=logits.shape[-1], vocab_block=contract.numerics.vocab_block)
