"""Gated activations, in fp32 with one rounding."""

from isoexec.ops._core.registry import op
from isoexec.ops.activation.checks import check_sigmoid_gate, check_silu_mul


@op(
    "activation.silu_mul",
    cpu=".reference:silu_mul", cuda=".triton:silu_mul",
    hazards=("x / (1 + exp(-x)) is not x * sigmoid(x)",), check=check_silu_mul,
)  # fmt: skip
def silu_mul(gate_up):
    """bf16(silu(gate) * up).

    Args:
        gate_up: [..., 2 F] bf16, gate then up.

    Returns:
        [..., F] bf16. Differentiable.
    """


@op("activation.sigmoid_gate", cpu=".reference:sigmoid_gate", cuda=".triton:sigmoid_gate", check=check_sigmoid_gate)
def sigmoid_gate(x, gate):
    """bf16(x * sigmoid(gate)): attention output gate, shared-expert gate.

    Args:
        x: [..., D] bf16; gate: broadcastable to ``x``, bf16.

    Returns:
        [..., D] bf16. Differentiable.
    """
