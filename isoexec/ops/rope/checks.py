"""What every implementation of the rotary embedding refuses."""

from __future__ import annotations

from isoexec.contract import ContractError
from isoexec.ops._core.expect import BF16, FP32, IDS, tensor


def check_table(positions, rotary_dim, theta) -> None:
    """Raises ContractError unless positions are integers [T]."""
    tensor("rope.rope_table", "positions", positions, IDS, "T")


def check_rotation(x, cos, sin, *, interleaved=False) -> None:
    """Raises ContractError unless x is [T, H, K] bf16 and cos, sin are [T, rotary_dim / 2] fp32 with rotary_dim <= K."""
    op = "rope.apply_rope"
    tensor(op, "x", x, BF16, "T", "H", "K")
    tensor(op, "cos", cos, FP32, x.shape[0], "rotary_dim / 2")
    tensor(op, "sin", sin, FP32, *cos.shape)
    if 2 * cos.shape[1] > x.shape[2]:
        raise ContractError(f"op {op}: cos, sin: expected at most {x.shape[2] // 2} angles for heads of {x.shape[2]} channels, found {cos.shape[1]}")
