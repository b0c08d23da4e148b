"""What each of four processes runs in test_tensor_parallel_cpu.py: the same op whole and cut over 1, 2 and 4 ranks."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from isoexec.contract import ContractError
from isoexec.ops import collective, logprob, matmul
from isoexec.ops._core.bits import assert_bit_equal, nudge
from isoexec.ops.collective.reference import all_gather, sum_over_ranks
from isoexec.ops.logprob import of_hidden
from isoexec.ops.matmul.reference import product
from op_checks import gradients

WORLD = 4


def main(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    try:
        for degree in (1, 2, 4):
            groups = [dist.new_group(list(range(first, first + degree))) for first in range(0, WORLD, degree)]
            group, place = groups[rank // degree], rank % degree
            for check in (row_parallel, planted_ulp, column_parallel, block, token_logprob, hidden_logprob, gathered_bits, owners, refusals):
                check(group, place, degree)
    finally:
        dist.destroy_process_group()


def bf16(*shape):
    return torch.randn(*shape).bfloat16()


def part(x, place, degree, dim=-1):
    return x.chunk(degree, dim)[place].contiguous()


def close(a, b):
    assert (a.double() - b.double()).abs().max() <= 0.02 * b.double().abs().max()


def row_parallel(group, place, degree):
    """Same bits for every degree, with and without sequence parallelism; gradients of the shard are the shard of the gradients."""
    x, w, b, seed = bf16(12, 256), bf16(70, 256), bf16(70), bf16(12, 70)
    whole_in = [t.clone().requires_grad_() for t in (x, w)]
    whole = matmul.row_parallel_linear(*whole_in, leaves=8, bias=b)
    whole_grads = gradients(whole, whole_in, seed)
    for sequence_parallel in (False, True):
        tp = collective.TensorParallel(group, sequence_parallel)
        mine = [part(t, place, degree).requires_grad_() for t in (x, w)]
        out = matmul.row_parallel_linear(*mine, leaves=8, bias=b, tp=tp)
        rows = (lambda t: part(t, place, degree, 0)) if sequence_parallel else (lambda t: t)
        assert_bit_equal(out, rows(whole), f"row-parallel, degree {degree}, sequence parallel {sequence_parallel}")
        for found, expected in zip(gradients(out, mine, rows(seed)), whole_grads):
            close(found, part(expected, place, degree))


def planted_ulp(group, place, degree):
    """The sum of fp32 partials in rank order, or one partial moved by an ulp, is told from the tree."""
    x, w = bf16(12, 256), bf16(70, 256)
    whole = product(x, w, 8)
    partial = product(part(x, place, degree), part(w, place, degree), 8 // degree)
    assert_bit_equal(sum_over_ranks(partial, group), whole, "fp32 before rounding")
    largest = int(partial.abs().argmax())
    moved = nudge(partial, largest, ulps=64) if place == degree - 1 else partial
    with pytest.raises(AssertionError, match="planted"):
        assert_bit_equal(sum_over_ranks(moved, group), whole, "planted")
    if degree == 4:
        in_rank_order = all_gather(partial, group).unbind()
        with pytest.raises(AssertionError, match="rank order"):
            assert_bit_equal(in_rank_order[0] + in_rank_order[1] + in_rank_order[2] + in_rank_order[3], whole, "rank order")


def column_parallel(group, place, degree):
    x, w, seed = bf16(12, 64), bf16(32, 64), bf16(12, 32)
    whole_in = x.clone().requires_grad_()
    whole = matmul.linear(whole_in, w)
    (whole_grad,) = gradients(whole, whole_in, seed)
    for sequence_parallel in (False, True):
        tp = collective.TensorParallel(group, sequence_parallel)
        rows = (lambda t: part(t, place, degree, 0)) if sequence_parallel else (lambda t: t)
        mine = rows(x).clone().requires_grad_()
        out = matmul.linear(collective.column_parallel_input(mine, tp=tp), part(w, place, degree, 0))
        assert_bit_equal(out, part(whole, place, degree), f"column-parallel, degree {degree}")
        (grad,) = gradients(out, mine, part(seed, place, degree))
        close(grad, rows(whole_grad))
        same_everywhere = all_gather(grad, group)
        if not sequence_parallel:
            assert_bit_equal(same_everywhere[0], same_everywhere[-1], "gradient on every rank")


def block(group, place, degree):
    """Column-parallel into row-parallel, as an MLP: sequence parallelism equals the all-reduce form bit for bit."""
    x, up, down = bf16(8, 64), bf16(256, 64), bf16(64, 256)
    whole = matmul.row_parallel_linear(matmul.linear(x, up), down, leaves=8)
    for sequence_parallel in (False, True):
        tp = collective.TensorParallel(group, sequence_parallel)
        mine = part(x, place, degree, 0) if sequence_parallel else x
        h = matmul.linear(collective.column_parallel_input(mine, tp=tp), part(up, place, degree, 0))
        out = matmul.row_parallel_linear(h, part(down, place, degree), leaves=8, tp=tp)
        if sequence_parallel:
            out = all_gather(out, group).flatten(0, 1)
        assert_bit_equal(out, whole, f"MLP, degree {degree}, sequence parallel {sequence_parallel}")


def token_logprob(group, place, degree):
    """A vocabulary that ends inside a shard, and one whose last shard is padding only."""
    for vocab_size, padded in ((1000, 1024), (130, 512), (512, 512)):
        logits, tokens, seed = torch.randn(9, padded) * 4, torch.randint(0, vocab_size, (9,)), torch.randn(9)
        logits[:, vocab_size:] = torch.nan
        whole_in = logits[:, :vocab_size].clone().requires_grad_()
        whole = logprob.token_logprob(whole_in, tokens, vocab_size=vocab_size, vocab_block=64)
        (whole_grad,) = gradients(whole, whole_in, seed)
        mine = part(logits, place, degree).requires_grad_()
        tp = collective.TensorParallel(group)
        out = logprob.token_logprob(mine, tokens, vocab_size=vocab_size, vocab_block=64, tp=tp)
        assert_bit_equal(out, whole, f"vocabulary {vocab_size} of {padded}, degree {degree}")
        (grad,) = gradients(out, mine, seed)
        expected = torch.nn.functional.pad(whole_grad, (0, padded - vocab_size))
        assert_bit_equal(grad, part(expected, place, degree), "gradient")


def hidden_logprob(group, place, degree):
    """By tiles of 32 rows of this rank's logits: the bits of the whole vocabulary, and the shards' gradients."""
    x, w, tokens, seed, temperature = bf16(70, 64), bf16(512, 64), torch.randint(0, 500, (70,)), torch.randn(70), torch.tensor(0.7)
    sizes = dict(vocab_size=500, vocab_block=64)
    whole_in = [t.clone().requires_grad_() for t in (x, w)]
    whole = logprob.token_logprob(logprob.scale_by_temperature(matmul.lm_head(*whole_in), temperature), tokens, **sizes)
    whole_grads = gradients(whole, whole_in, seed)
    mine = [x.clone().requires_grad_(), part(w, place, degree, 0).requires_grad_()]
    with mock.patch.object(of_hidden, "LOGIT_BYTES", 1 << 14):
        out = of_hidden.of_hidden(*mine, tokens, temperature, tp=collective.TensorParallel(group), **sizes)
        assert "Tiles" in type(out.grad_fn).__name__
        grad_x, grad_w = gradients(out, mine, seed)
    assert_bit_equal(out, whole, f"degree {degree}")
    close(sum_over_ranks(grad_x.float(), group), whole_grads[0])
    close(grad_w, part(whole_grads[1], place, degree, 0))


def refusals(group, place, degree):
    tp = collective.TensorParallel(group)
    x = torch.ones(2, 96 // degree, dtype=torch.bfloat16)
    with pytest.raises(ContractError, match=r"K = 96 is not a multiple"):
        matmul.row_parallel_linear(x, x, leaves=8, tp=tp)
    if degree > 1:
        with pytest.raises(ContractError, match="1 leaves for"):
            matmul.row_parallel_linear(x, x, leaves=1, tp=tp)
        with pytest.raises(ContractError, match="not whole blocks of 64"):
            logprob.token_logprob(torch.ones(2, 100), torch.zeros(2, dtype=torch.int64), vocab_size=200, vocab_block=64, tp=tp)
        odd = torch.ones(5, 256 // degree, dtype=torch.bfloat16)
        with pytest.raises(ContractError, match="5 tokens do not divide"):
            matmul.row_parallel_linear(odd, odd, leaves=8, tp=collective.TensorParallel(group, True))


def hostile(rows, width):
    """bf16 bits that a sum, a cast or a flush would change: -0.0, subnormals and NaN payloads among ordinary numbers."""
    x = torch.randn(rows, width).bfloat16()
    x.view(torch.int16)[::2, :4] = torch.tensor([-0x8000, 0x0001, 0x7FC5, -0x7FFF], dtype=torch.int16)
    return x


def gathered_bits(group, place, degree):
    """The input of a column-parallel product travels as bytes; no tokens are none."""
    whole = hostile(12, 8)
    for sequence_parallel in (False, True):
        tp = collective.TensorParallel(group, sequence_parallel)
        mine = part(whole, place, degree, 0) if sequence_parallel else whole
        out = collective.column_parallel_input(mine, tp=tp)
        assert_bit_equal(out, whole, f"gathered, degree {degree}")
        assert collective.column_parallel_input(whole[:0], tp=tp).shape == (0, 8)
    with pytest.raises(AssertionError, match="a flipped sign of zero"):
        assert_bit_equal(out + 0.0, whole, "a flipped sign of zero")


def owners(group, place, degree):
    """A token's row comes from its owner, bit for bit; what others hold is NaN. Its gradient goes back to the owner alone."""
    whole, owner, seed = hostile(12, 8), torch.arange(12) * 7 % degree, bf16(12, 8)
    mine = torch.where((owner == place)[:, None], whole.view(torch.int16), 0x7FFF).view(torch.bfloat16)
    for sequence_parallel in (False, True):
        tp = collective.TensorParallel(group, sequence_parallel)
        rows = (lambda t: part(t, place, degree, 0)) if sequence_parallel else (lambda t: t)
        leaf = mine.clone().requires_grad_()
        out = collective.rows_of_owners(leaf, owner, tp=tp)
        assert_bit_equal(out, rows(whole), f"rows of owners, degree {degree}, sequence parallel {sequence_parallel}")
        (grad,) = gradients(out, leaf, rows(seed))
        assert_bit_equal(grad, torch.where((owner == place)[:, None], seed, 0.0), "gradient of the owner")
        assert collective.rows_of_owners(mine[:0], owner[:0], tp=tp).shape == (0, 8)
    if degree > 1:  # a row from a rank that does not own it would show
        with pytest.raises(AssertionError, match="another owner"):
            assert_bit_equal(collective.rows_of_owners(mine, (owner + 1) % degree, tp=tp), rows(whole), "another owner")
