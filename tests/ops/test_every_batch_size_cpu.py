"""Every op over M rows from buffers at any alignment has the bits of the op over all rows, M in 1 .. 257, on one thread and on two (a few
dear ones at the edges of tiles and chunks); a row of NaN stays in its row, and no rows give no rows.

Values are fp32 that bf16 holds, so results are seen before their rounding.
"""

from pathlib import Path

import pytest
import torch

from isoexec.ops import activation, attention, embedding, gdn, logprob, matmul, moe, norm, rope
from isoexec.ops._core import registry
from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops.moe.reference import weighted_total
from isoexec.runtimes import evidence
from op_checks import bf16_values, same_bits

ROWS, EPS = 257, 1e-6
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


def residual_add():
    return lambda x: norm.residual_add(x[:, :24], x[:, 24:]), bf16_values(ROWS, 48)


def zero_centered_rms_norm():
    w = bf16_values(48)
    return lambda x: norm.zero_centered_rms_norm(x, w, EPS), bf16_values(ROWS, 48)


def add_zero_centered_rms_norm():
    w = bf16_values(24)
    return lambda x: torch.cat(norm.add_zero_centered_rms_norm(x[:, :24], x[:, 24:], w, EPS), 1), bf16_values(ROWS, 48)


def gated_rms_norm():
    w = bf16_values(24)
    return lambda x: norm.gated_rms_norm(x[:, :24], x[:, 24:], w, EPS), bf16_values(ROWS, 48)


def token_embedding():
    """Ids as numbers that bf16 holds one apart."""
    w = bf16_values(300, 24)
    return lambda x: embedding.embedding(x.long(), w), torch.randint(128, 256, (ROWS,)).float()


def sigmoid_gate():
    return lambda x: activation.sigmoid_gate(x[:, :35], x[:, 35:]), bf16_values(ROWS, 70)


def silu_mul():
    return activation.silu_mul, bf16_values(ROWS, 70)


def rope_table():
    """Positions as numbers that bf16 holds one apart."""
    return lambda x: torch.cat(rope.rope_table(x.long(), 16, 1e6), 1), torch.randint(128, 256, (ROWS,)).float()


def apply_rope():
    table = rope.rope_table(torch.arange(ROWS), 16, 1e6)
    return lambda x: rope.apply_rope(x, *(t[: len(x)] for t in table)), bf16_values(ROWS, 3, 24)


def varlen_attention():
    """The first M tokens of one sequence; queries, keys and values side by side, as a stacked product gives them."""

    def attend(x):
        starts = torch.tensor([0, len(x)], dtype=torch.int32)
        return attention.varlen(x[:, :4], x[:, 4:6], x[:, 6:], starts, scale=0.25, kv_block=64)

    return attend, bf16_values(ROWS, 8, 16)


def paged_attention():
    """Decode: a token of each of M sequences, 5 to 21 tokens long, pages of 4 in any order."""
    caches = [bf16_values(6 * ROWS, 4, 2, 16) for _ in "kv"]
    table, lengths = torch.randperm(6 * ROWS).view(ROWS, 6).int(), (torch.arange(ROWS) % 17 + 5).int()

    def attend(q):
        n = len(q)
        return attention.paged(q, *caches, table[:n], lengths[:n], torch.arange(n + 1).int(), scale=0.25, kv_block=64)

    return attend, bf16_values(ROWS, 4, 16)


def router_logits():
    w = bf16_values(70, 48)
    return lambda x: moe.router_logits(x, w), bf16_values(ROWS, 48)


def route():
    return lambda x: torch.cat([t.float() for t in moe.route(x, top_k=4, renormalize=True)], 1), bf16_values(ROWS, 30, scale=2.0)


def expert_mlp():
    weights, experts = (bf16_values(6, 32, 24).bfloat16(), bf16_values(6, 24, 16).bfloat16()), torch.rand(ROWS, 6).argsort(-1)[:, :2]
    return lambda x: moe.expert_mlp(x.bfloat16(), experts[: len(x)], *weights), bf16_values(ROWS, 24)


def combine():
    """Before its rounding; groups of two experts."""
    weights, experts = torch.rand(ROWS, 4), torch.rand(ROWS, 16).argsort(-1)[:, :4]
    return lambda x: weighted_total(x, weights[: len(x)], experts[: len(x)], None, 0, 8, 2, None, None), bf16_values(ROWS, 4, 24)


def conv1d():
    """The first M tokens of one sequence."""
    w = bf16_values(48, 4)
    return lambda x: gdn.conv1d(x, w, gdn.Plan([len(x)], 16))[0], bf16_values(ROWS, 48)


def gating():
    A_log, dt_bias = torch.rand(6), torch.randn(6)
    return lambda x: torch.cat(gdn.gating(x[:, :6], x[:, 6:], A_log, dt_bias), 1), bf16_values(ROWS, 12, scale=3.0)


def l2norm():
    return gdn.l2norm, bf16_values(ROWS, 2, 24)


def conv1d_step():
    """A token of each of M sequences."""
    w, window = bf16_values(48, 4), bf16_values(ROWS, 3, 48)
    return lambda x: gdn.conv1d_step(x, w, window[: len(x)].clone(), torch.arange(len(x)).int()), bf16_values(ROWS, 48)


def heads(x):
    """q, k and v of one head of 16 channels, side by side in the rows of x."""
    q, k = (gdn.l2norm(t[:, None].bfloat16()) for t in (x[:, :16], x[:, 16:32]))
    return q, k, x[:, None, 32:].bfloat16()


def gdn_trainer(form="cpr_wy"):
    """The first M tokens of one sequence, before the rounding."""
    g, beta = -torch.rand(ROWS, 1), torch.rand(ROWS, 1)

    def core(x):
        n = len(x)
        return getattr(gdn, form)(*heads(x), g[:n], beta[:n], gdn.Plan([n], 16), out_dtype=torch.float32)

    return core, bf16_values(ROWS, 48)


def gdn_trainer_cpr():
    return gdn_trainer("cpr")


def gdn_decode(form="cpr_wy"):
    """A step of M sequences that have four tokens of an open chunk, before the rounding."""
    pool = gdn.POOLS[form].empty(ROWS, 1, 1, 16, 16, 16)
    pool.high[:], pool.low[:] = gdn.split_planes(torch.randn(ROWS, 1, 16, 16))
    pool.k[:], pool.rhs[:] = gdn.l2norm(bf16_values(ROWS, 1, 16, 16)), bf16_values(ROWS, 1, 16, 16)
    pool.gates[:] = torch.rand(ROWS, 1, 2, 16)
    pool.gates[:, :, 0] = -pool.gates[:, :, 0].cumsum(-1)
    if form == "cpr":
        pool.now[:] = torch.randn(ROWS, 1, 16, 16)
    g, beta = -torch.rand(ROWS, 1), torch.rand(ROWS, 1)

    def step(x):
        n, own = len(x), type(pool)(*(t[: len(x)].clone() for t in pool.tensors()))
        at = torch.arange(n).int()
        core = getattr(gdn, f"{form}_decode")
        return core(*heads(x), g[:n], beta[:n], own, at, torch.full_like(at, 20), out_dtype=torch.float32)

    return step, bf16_values(ROWS, 48)


def gdn_decode_cpr():
    return gdn_decode("cpr")


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
    linear, row_parallel_linear, lm_head, residual_add, rms_norm, add_rms_norm, zero_centered_rms_norm, add_zero_centered_rms_norm,
    gated_rms_norm, token_embedding, silu_mul, sigmoid_gate, rope_table, apply_rope, varlen_attention, paged_attention, router_logits,
    route, expert_mlp, combine, conv1d, conv1d_step, gating, l2norm, gdn_trainer, gdn_trainer_cpr, gdn_decode, gdn_decode_cpr,
    scaled_log_softmax, token_logprob,
)  # fmt: skip
#: Rows that are tokens of one sequence, or ids; and rows that are refused when they hold NaN.
NOT_APART, REFUSING = (varlen_attention, conv1d, token_embedding, rope_table), (gdn_trainer, gdn_trainer_cpr, gdn_decode, gdn_decode_cpr)
#: Ops without rows of a batch, or whose rows are these ops' under another name: where they are tested.
ELSEWHERE = {
    "attention.write_cache": "ops/test_hostile_values_cpu.py",  # moves bits
    "collective.column_parallel_input": "ops/tensor_parallel_ranks.py",
    "collective.rows_of_owners": "ops/tensor_parallel_ranks.py",
    "gdn.cpr_prefill": "gdn/test_forms_cpu.py",
    "gdn.cpr_wy_prefill": "gdn/test_forms_cpu.py",
    "gdn.cpr_wy_step": "gdn/test_step_cpu.py",
    "gdn.mixer_inputs": "gdn/test_edges_cpu.py",
    "gdn.mixer_step": "gdn/test_step_cpu.py",
    "gdn.mixer_step_inputs": "gdn/test_edges_cpu.py",
    "moe.combine": "moe/test_combine.py",  # the case here is its sum before the rounding
    "moe.dispatch": "moe/test_expert_parallel.py",
    "moe.load_balancing_loss": "moe/test_balance.py",
    "moe.tokens_per_expert": "moe/test_balance.py",
    "moe.update_expert_bias": "moe/test_balance.py",
    "sampling.draw": "ops/test_sampling_cpu.py",
    "sampling.first_maximum": "ops/test_sampling_cpu.py",
    "sampling.split_greedy": "ops/test_sampling_cpu.py",
}
#: A tenth of a second a call: at the edges of tiles and chunks. Their neighbours among the cases share their arithmetic.
DEAR, EDGES = (conv1d_step, gdn_trainer, gdn_trainer_cpr, gdn_decode_cpr), (1, 2, 3, 15, 16, 17, 33, 64, 65, 129, 257)


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("case", OPS, ids=lambda case: case.__name__)
def test_every_number_of_rows(case, threads):
    op, x = case()
    whole = op(x)
    torch.set_num_threads(threads)
    try:
        for rows in EDGES if case in DEAR or (case, threads) == (gdn_decode, 2) else range(1, ROWS + 1):
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


@pytest.mark.parametrize("case", [c for c in OPS if c not in NOT_APART + REFUSING], ids=lambda case: case.__name__)
def test_a_row_of_nan_stays_in_its_row(case):
    op, x = case()
    x = x[:40]
    clean, at = op(x), 33
    x = x.clone()
    x[at] = float("nan")
    found = op(x)
    same_bits(torch.cat([found[:at], found[at + 1 :]]), torch.cat([clean[:at], clean[at + 1 :]]), "rows beside NaN")
    assert found[at].isnan().any()


@pytest.mark.parametrize("case", OPS, ids=lambda case: case.__name__)
def test_no_rows(case):
    op, x = case()
    whole, none = op(x[:1]), op(x[:0])
    assert none.shape == (0, *whole.shape[1:]) and none.dtype == whole.dtype


def test_no_op_is_left_out():
    """An op that is declared is a case here, or says where its rows are tested."""

    class Seen(set):
        def before(self, declaration, args, kwargs):
            self.add(declaration.name)

        def after(self, seen, result):
            pass

    with registry.observing(Seen()) as called:
        for case in OPS:
            op, x = case()
            op(x[:1])
    assert called | ELSEWHERE.keys() == evidence.declarations().keys()
    assert all((Path(__file__).parents[1] / file).is_file() for file in ELSEWHERE.values())


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
