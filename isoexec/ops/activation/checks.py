"""What every implementation of a gated activation refuses."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops._core.expect import BF16, tensor


def check_silu_mul(gate_up) -> None:
    """Raises ContractError unless gate_up is [..., 2 F] bf16."""
    tensor("activation.silu_mul", "gate_up", gate_up, BF16, ..., "2 F")
    if gate_up.shape[-1] % 2:
        raise ContractError(f"op activation.silu_mul: gate_up: expected shape [..., 2 F], found {list(gate_up.shape)}; gate, then up")


def check_sigmoid_gate(x, gate) -> None:
    """Raises ContractError unless both are bf16 and the gate broadcasts to x."""
    tensor("activation.sigmoid_gate", "x", x, BF16, ..., "D")
    tensor("activation.sigmoid_gate", "gate", gate, BF16)
    if gate.dim() > x.dim() or any(n not in (1, m) for n, m in zip(reversed(gate.shape), reversed(x.shape))):
        raise ContractError(f"op activation.sigmoid_gate: gate: expected a shape that broadcasts to {list(x.shape)}, found {list(gate.shape)}")
