"""RMS norms and the residual add. The mean of squares is a fixed row sum in fp32."""

from functools import partial

from isoexec.ops._core.registry import op
from isoexec.ops.norm.checks import check_add_norm, check_gated, check_norm, check_pair


@op("norm.residual_add", cpu=".reference:residual_add", cuda=".triton:residual_add", check=partial(check_pair, "norm.residual_add"))
def residual_add(x, residual):
    """bf16(x + residual), the sum taken in fp32.

    Args:
        x, residual: [..., D] bf16.

    Returns:
        [..., D] bf16. Differentiable.
    """


@op(
    "norm.rms_norm",
    cpu=".reference:rms_norm", cuda=".triton:rms_norm",
    hazards=("the rounding before the weight is part of the architecture",), check=partial(check_norm, "norm.rms_norm"),
)  # fmt: skip
def rms_norm(x, weight, eps):
    """Qwen3's RMSNorm: bf16(bf16(x * rsqrt(mean(x^2) + eps)) * weight).

    Args:
        x: [..., D] bf16.
        weight: [D] bf16, as the checkpoint has it.
        eps: float.

    Returns:
        [..., D] bf16. Differentiable.
    """


@op("norm.add_rms_norm", cpu=".reference:add_rms_norm", cuda=".triton:add_rms_norm", check=partial(check_add_norm, "norm.add_rms_norm"))
def add_rms_norm(x, residual, weight, eps):
    """:func:`residual_add`, then :func:`rms_norm` of the rounded sum; one kernel on a GPU, the same bits.

    Returns:
        (normed [..., D] bf16, residual [..., D] bf16). Differentiable.
    """


@op(
    "norm.zero_centered_rms_norm",
    cpu=".reference:zero_centered_rms_norm", cuda=".triton:zero_centered_rms_norm",
    hazards=("w stored as w - 1 does not survive bf16",), check=partial(check_norm, "norm.zero_centered_rms_norm"),
)  # fmt: skip
def zero_centered_rms_norm(x, weight, eps):
    """Qwen3.5's RMSNorm: bf16(x * rsqrt(mean(x^2) + eps) * (1 + weight)), all in fp32, one rounding. Shapes as :func:`rms_norm`."""


@op(
    "norm.add_zero_centered_rms_norm",
    cpu=".reference:add_zero_centered_rms_norm", cuda=".triton:add_zero_centered_rms_norm",
    check=partial(check_add_norm, "norm.add_zero_centered_rms_norm"),
)  # fmt: skip
def add_zero_centered_rms_norm(x, residual, weight, eps):
    """:func:`residual_add`, then :func:`zero_centered_rms_norm`; returns (normed, residual)."""


@op("norm.gated_rms_norm", cpu=".reference:gated_rms_norm", cuda=".triton:gated_rms_norm", check=check_gated)
def gated_rms_norm(x, gate, weight, eps):
    """Output norm of Gated DeltaNet: bf16(x * rsqrt(mean(x^2) + eps) * weight * silu(gate)), all in fp32, one rounding.

    Args:
        x: [..., D] bf16; gate: [..., D] bf16; weight: [D] bf16 or fp32; eps: float.

    Returns:
        [..., D] bf16. Differentiable.
    """
