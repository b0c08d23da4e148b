"""Rotary position embedding. Angles, cos and sin in fp32 from integer positions; the table is never cast to bf16."""

from isoexec.ops._core.registry import op
from isoexec.ops.rope.checks import check_rotation, check_table


@op(
    "rope.rope_table",
    cpu=".reference:rope_table", cuda=".triton:rope_table",
    hazards=("cos and sin of a vector tail differ from those of a full vector",), check=check_table,
)  # fmt: skip
def rope_table(positions, rotary_dim, theta):
    """cos and sin of position * theta^(-2i / rotary_dim).

    Inverse frequencies are computed on the host in double precision and rounded once to fp32; the angle is one fp32 product.

    Args:
        positions: [T] int64, absolute, >= 0.
        rotary_dim: even int, leading channels of a head that rotate.
        theta: float, base.

    Returns:
        (cos, sin), each [T, rotary_dim / 2] fp32.
    """


@op("rope.apply_rope", cpu=".reference:apply_rope", cuda=".triton:apply_rope", check=check_rotation)
def apply_rope(x, cos, sin, *, interleaved=False):
    """Rotate the first ``rotary_dim = 2 * cos.shape[-1]`` channels of each head, every channel in its place.

    Args:
        x: [T, H, K] bf16.
        cos, sin: [T, rotary_dim / 2] fp32.
        interleaved: angle i turns channels 2 i and 2 i + 1 (DeepSeek, GLM), else channels i and i + rotary_dim / 2 (GPT-NeoX).

    Returns:
        [T, H, K] bf16, rotation in fp32, one rounding; other channels unchanged. Differentiable in ``x``.
    """
