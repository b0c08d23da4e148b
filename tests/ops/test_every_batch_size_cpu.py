"""Every op over M rows from buffers at any alignment has the bits of the op over all rows: M in 1 .. 257 on one thread, and on two
those M at the edges of tiles and vectors.

Values are fp32 that bf16 holds, so results are seen before their rounding.
"""

import pytest
import torch

from isoexec.ops import activation, attention, logprob, matmul, norm, rope
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from op_checks import bf16_values

ROWS, EPS = 257, 1e-6
ON_THREADS = {1: range(1, ROWS + 1), 2: (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)}
ONE_BF16_ULP = 1 << 16


def at_offset(x, elements):
    """A copy of ``x`` whose first element lies ``elements`` after the start of its allocation."""
    buffer = torch.empty(x.numel() + elements, dtype=x.dtype)
    return buffer[elements:].view_as(x).copy_(x)


def linear():
    w, b = bf16_values(70, 48), bf16_values(70)
    return lambda x: matmul.linear(x, w, b), bf16_values(ROWS, 48)


def row_parallel_linear():
    w = bf16_values(70, 128)
    return lambda x: matmul.row_parallel_linear(x, w, leaves=8), bf16_values(ROWS, 128)


def lm_head():
    w = bf16_values(130, 48)
    return lambda x: matmul.lm_head(x, w), bf16_values(ROWS, 48)


def rms_norm():
    w = bf16_values(48)
    return lambda x: norm.rms_norm(x, w, EPS), bf16_values(ROWS, 48)


def add_rms_norm():
    w = bf16_values(24)
    return lambda x: torch.cat(norm.add_rms_norm(x[:, :24], x[:, 24:], w, EPS), 1), bf16_values(ROWS, 48)


def silu_mul():
    return activation.silu_mul, bf16_values(ROWS, 70)


def apply_rope():
    table = rope.rope_table(torch.arange(ROWS), 16, 1e6)
    return lambda x: rope.apply_rope(x, *(t[: len(x)] for t in table)), bf16_values(ROWS, 3, 24)


def varlen_attention():
    """The first M tokens of one sequence; queries, keys and values side by side, as a stacked product gives them."""

    def attend(x):
        starts = torch.tensor([0, len(x)], dtype=torch.int32)
        return attention.varlen(x[:, :4], x[:, 4:6], x[:, 6:], starts, scale=0.25, kv_block=64)

    return attend, bf16_values(ROWS, 8, 16)


def scaled_log_softmax():
    temperature = torch.tensor(0.7)
    return (
        lambda x: logprob.log_softmax(logprob.scale_by_temperature(x, temperature), vocab_size=130, vocab_block=64),
        bf16_values(ROWS, 130, scale=3.0),
    )


def token_logprob():
    tokens = torch.randint(0, 130, (ROWS,))
    return lambda x: logprob.token_logprob(x, tokens[: len(x)], vocab_size=130, vocab_block=64), bf16_values(ROWS, 130, scale=3.0)


OPS = (
    linear, row_parallel_linear, lm_head, rms_norm, add_rms_norm, silu_mul, apply_rope, varlen_attention, scaled_log_softmax, token_logprob,
)  # fmt: skip


@pytest.mark.parametrize("threads", ON_THREADS)
@pytest.mark.parametrize("case", OPS, ids=lambda case: case.__name__)
def test_every_number_of_rows(case, threads):
    op, x = case()
    whole = op(x)
    torch.set_num_threads(threads)
    try:
        for rows in ON_THREADS[threads]:
            assert_bit_equal(op(at_offset(x[:rows], rows % 17)), whole[:rows], f"{case.__name__}, {rows} rows, {threads} threads")
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("case", OPS, ids=lambda case: case.__name__)
def test_one_ulp_of_one_input_shows_in_its_row(case):
    """Negative control: the comparison above sees the smallest change that an input can have."""
    op, x = case()
    before, row = op(x), ROWS - 1  # the last: in attention every later row may change
    moved = nudge(x, row * x[0].numel() + int(x[row].abs().flatten().argmax()), ONE_BF16_ULP)
    after = op(moved)
    assert bit_equal(after[:row], before[:row]) and not bit_equal(after[row], before[row])


def test_subnormals_and_signed_zeros_pass_activations_and_rotations():
    tiny = torch.full((3, 8), 2.0**-133, dtype=torch.bfloat16)
    one, zero = torch.ones_like(tiny), torch.zeros_like(tiny)
    half = torch.full_like(tiny, 2.0**-131)
    assert_bit_equal(activation.sigmoid_gate(half, zero), half * 0.5, "x / 2")
    assert_bit_equal(activation.sigmoid_gate(-zero, one), -zero, "-0.0 through a gate")
    assert_bit_equal(activation.silu_mul(torch.cat([half, one], 1)), half * 0.5, "silu(x) is x / 2 near 0")
    assert_bit_equal(activation.silu_mul(torch.cat([one * 40, tiny], 1)), tiny * 40, "a subnormal beside the gate")
    still = rope.rope_table(torch.zeros(3, dtype=torch.int64), 8, 1e6)  # cos 1, sin 0
    assert_bit_equal(rope.apply_rope(tiny[:, None], *still), tiny[:, None], "rotation by 0")
    assert tiny.any() and not bit_equal(nudge(tiny), tiny)
