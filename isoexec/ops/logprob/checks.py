"""What every implementation of the log-softmax refuses."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops._core.expect import FP32, IDS, tensor
from isoexec.ops.collective.reference import group_size


def check_scale(logits, temperature) -> None:
    """Raises ContractError unless logits are [T, V] fp32 and temperature is an fp32 scalar tensor or [T]."""
    op = "logprob.scale_by_temperature"
    tensor(op, "logits", logits, FP32, "T", "V")
    tensor(op, "temperature", temperature, FP32)
    if temperature.shape not in ((), (1,), logits.shape[:1]):
        raise ContractError(f"op {op}: temperature: expected a scalar or [{logits.shape[0]}], found shape {list(temperature.shape)}")


def check_rows(logits, *, vocab_size, vocab_block) -> None:
    """Raises ContractError unless logits are [T, V] fp32 and V holds the vocabulary."""
    _check_vocabulary("logprob.log_softmax", logits, vocab_size, vocab_block, 1)


def check_tokens(logits, tokens, *, vocab_size, vocab_block, tp=None, keep=None) -> None:
    """Raises ContractError unless logits are [T, V / n] fp32, a shard of whole blocks that together hold the vocabulary, and tokens [T]."""
    op, ranks = "logprob.token_logprob", group_size(tp)
    _check_vocabulary(op, logits, vocab_size, vocab_block, ranks)
    tensor(op, "tokens", tokens, IDS, logits.shape[0])
    if ranks > 1 and logits.shape[1] % vocab_block:
        raise ContractError(
            f"op {op}: a vocabulary shard of {logits.shape[1]} is not whole blocks of {vocab_block}; "
            "pad the vocabulary (Megatron: make-vocab-size-divisible-by) to a multiple of block * tensor-parallel degree"
        )


def _check_vocabulary(op: str, logits, vocab_size: int, vocab_block: int, ranks: int) -> None:
    tensor(op, "logits", logits, FP32, "T", "V")
    if not 1 <= vocab_size <= logits.shape[1] * ranks:
        raise ContractError(f"op {op}: vocab_size: expected 1 to the {logits.shape[1] * ranks} columns, found {vocab_size}")
    if vocab_block < 1:
        raise ContractError(f"op {op}: vocab_block: expected 1 or more, found {vocab_block}; the contract's numerics.vocab_block is one")
