"""What every implementation of sampling refuses."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops._core.expect import FP32, tensor


def check_draw(logprobs, generators) -> None:
    """Raises ContractError unless logprobs are [T, V] fp32 and there are T generators."""
    tensor("sampling.draw", "logprobs", logprobs, FP32, "T", "V")
    if len(generators) != logprobs.shape[0]:
        raise ContractError(f"op sampling.draw: generators: expected one for each of {logprobs.shape[0]} rows, or None, found {len(generators)}")


def check_temperature(temperature) -> None:
    """Raises ContractError unless temperature is [T] fp32."""
    tensor("sampling.split_greedy", "temperature", temperature, FP32, "T")


def check_logits(logits) -> None:
    """Raises ContractError unless logits are [T, V] fp32."""
    tensor("sampling.first_maximum", "logits", logits, FP32, "T", "V")
