"""Temperature, log-softmax and token logprob of the CPU backend."""

import pytest
import torch

from isoexec.contract import ContractError
from isoexec.ops import logprob, matmul
from isoexec.ops._core.bits import bit_equal, nudge, row_digests
from isoexec.ops.logprob import of_hidden
from op_checks import batch_invariant, gradients_close, same_bits

V = 1000


def settings(vocab_size=V):
    return dict(vocab_size=vocab_size, vocab_block=64)


def test_accuracy():
    logits = torch.randn(40, V) * 6
    expected = logits.double().log_softmax(-1)
    found = logprob.log_softmax(logits, **settings())
    assert ((found.double() - expected).abs() <= 2.0**-22 * expected.abs().clamp(min=1)).all()


def test_the_token_has_the_bits_of_its_row():
    logits, tokens = torch.randn(40, V) * 4, torch.randint(0, V, (40,))
    rows = logprob.log_softmax(logits, **settings())
    picked = rows.gather(1, tokens[:, None]).squeeze(1)
    same_bits(logprob.token_logprob(logits, tokens, **settings()), picked, "token logprob")
    same_bits(logprob.token_logprob(logits, tokens.int(), **settings()), picked, "int32 tokens")


def test_rows_do_not_depend_on_the_batch():
    logits, tokens, temperature = torch.randn(257, V) * 4, torch.randint(0, V, (257,)), torch.rand(257) + 0.5
    batch_invariant(lambda x: logprob.log_softmax(x, **settings()), logits, what="log_softmax")
    batch_invariant(lambda x, t: logprob.token_logprob(x, t, **settings()), logits, tokens, what="token_logprob")
    batch_invariant(logprob.scale_by_temperature, logits, temperature, what="scale_by_temperature")


def test_a_wide_vocabulary_takes_several_passes():
    logits, tokens = torch.randn(9, 151_936), torch.randint(0, 151_936, (9,))
    whole = logprob.token_logprob(logits, tokens, **settings(151_936))
    alone = torch.cat([logprob.token_logprob(x[None], t[None], **settings(151_936)) for x, t in zip(logits, tokens)])
    same_bits(alone, whole, "row by row")


@pytest.mark.parametrize("padded", [1024, 1152, 2304])
@pytest.mark.parametrize("filling", [torch.nan, torch.inf, 50.0, 0.0])
def test_padded_vocabulary_rows_do_not_enter(padded, filling):
    """A trainer pads its vocabulary, the engine does not (or to another size): same logprob, padding gets -inf."""
    logits, tokens = torch.randn(12, V), torch.randint(0, V, (12,))
    wide = torch.nn.functional.pad(logits, (0, padded - V), value=filling)
    rows = logprob.log_softmax(wide, **settings())
    same_bits(rows[:, :V], logprob.log_softmax(logits, **settings()), "log_softmax")
    assert (rows[:, V:] == -torch.inf).all()
    same_bits(logprob.token_logprob(wide, tokens, **settings()), logprob.token_logprob(logits, tokens, **settings()), "token")


def test_equal_token_logprobs_do_not_prove_equal_rows():
    """One ulp in a logit of a token that was not sampled: the row's digest sees it."""
    logits = torch.randn(4, 128)
    logits[2, 7] = 1.5
    moved = nudge(logits, 2 * 128 + 7)
    a, b = (row_digests(logprob.log_softmax(x, **settings(128))) for x in (logits, moved))
    assert [x == y for x, y in zip(a, b)] == [True, True, False, True]
    assert a == row_digests(logprob.log_softmax(logits.repeat(9, 1), **settings(128)))[4:8]


def test_temperature_is_a_true_division_in_fp32():
    logits = torch.randn(64, 200)
    scalar = logprob.scale_by_temperature(logits, torch.tensor(0.7))
    same_bits(scalar, logits / torch.full((64, 200), 0.7), "division")
    same_bits(logprob.scale_by_temperature(logits, torch.full((64,), 0.7)), scalar, "one temperature per row")
    same_bits(logprob.scale_by_temperature(logits, torch.tensor(1.0)), logits, "temperature 1")
    assert not bit_equal(scalar, logits * (1 / torch.tensor(0.7)))
    tiny = torch.full((1, 3), 2.0**-126)
    same_bits(logprob.scale_by_temperature(tiny, torch.tensor(4.0)), torch.full((1, 3), 2.0**-128), "subnormal quotient")


def test_extreme_logits():
    logits = torch.tensor([[1e30, -1e30, 0.0, -0.0], [-200.0, -200.0, -320.0, -torch.inf]])
    rows = logprob.log_softmax(logits, **settings(4))
    assert rows[0].tolist() == [0.0, pytest.approx(-2e30), pytest.approx(-1e30), pytest.approx(-1e30)]
    assert rows[1, 0].item() == pytest.approx(-0.6931472, rel=1e-6) and rows[1, 3] == -torch.inf


def test_no_rows():
    empty = torch.zeros(0, V)
    assert logprob.log_softmax(empty, **settings()).shape == (0, V)
    assert logprob.token_logprob(empty, torch.zeros(0, dtype=torch.int64), **settings()).shape == (0,)


def test_gradients():
    tokens = torch.randint(0, 90, (7,))
    op = lambda x: logprob.token_logprob(x, tokens, **settings(90))  # noqa: E731
    reference = lambda x: x[:, :90].log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)  # noqa: E731
    gradients_close(op, reference, (torch.randn(7, 100),), tolerance=1e-5)
    temperature = torch.rand(7) + 0.5
    scale = lambda x: logprob.scale_by_temperature(x, temperature)  # noqa: E731
    gradients_close(scale, lambda x: x / temperature.double()[:, None], (torch.randn(7, 100),), tolerance=1e-6)


def test_what_does_not_fit_is_refused():
    logits, tokens = torch.randn(2, V), torch.tensor([0, V - 1])
    with pytest.raises(ContractError, match=r"outside \[0, 999\)"):
        logprob.token_logprob(logits, tokens, **settings(999))
    with pytest.raises(ContractError, match="outside"):
        logprob.token_logprob(logits, tokens - 1, **settings())
    with pytest.raises(ContractError, match="torch.bfloat16"):
        logprob.log_softmax(logits.bfloat16(), **settings())
    with pytest.raises(ContractError, match="torch.float64"):
        logprob.scale_by_temperature(logits, torch.tensor(0.7, dtype=torch.float64))
    with pytest.raises(ContractError, match="expected temperatures above 0, found 0.0"):
        logprob.scale_by_temperature(logits, torch.tensor([1.0, 0.0]))
    for size in (0, V + 1):
        with pytest.raises(ContractError, match=f"log_softmax: vocab_size: expected 1 to the {V} columns, found {size}"):
            logprob.log_softmax(logits, **settings(size))
        with pytest.raises(ContractError, match=f"token_logprob: vocab_size: expected 1 to the {V} columns, found {size}"):
            logprob.token_logprob(logits, tokens, **settings(size))


@pytest.mark.parametrize("temperature", [torch.tensor(0.7), torch.linspace(0.5, 1.5, 150)], ids=["one", "of each row"])
def test_from_hidden_states_no_tile_moves_a_bit(monkeypatch, temperature):
    """Tiles of 32 rows (and of columns, in backward) against the whole logits; the weight holds padding."""
    x, weight = torch.randn(150, 96).bfloat16().requires_grad_(), (torch.randn(V + 24, 96) * 0.3).bfloat16().requires_grad_()
    tokens, grad = torch.randint(0, V, (150,)), torch.randn(150)
    want = logprob.token_logprob(logprob.scale_by_temperature(matmul.lm_head(x, weight), temperature), tokens, **settings())
    seen = []
    same_bits(of_hidden.of_hidden(x, weight, tokens, temperature, see=seen.append, **settings()), want, "one tile")
    monkeypatch.setattr(of_hidden, "LOGIT_BYTES", 1 << 17)
    found = of_hidden.of_hidden(x, weight, tokens, temperature, see=seen.append, **settings())
    assert len(seen) > 2
    same_bits(torch.cat(seen[1:]), seen[0], "what is shown")
    assert "Tiles" in type(found.grad_fn).__name__
    same_bits(found, want, "tiles")
    moved = of_hidden.of_hidden(nudge(x.detach(), index=3 * 96 + 5), weight, tokens, temperature, **settings())
    assert not bit_equal(moved[3:4], want[3:4])
    same_bits(moved[4:], want[4:], "other rows")
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(of_hidden, "_backend", None)  # a score keeps nothing for a gradient
        same_bits(of_hidden.of_hidden(x, weight, tokens, temperature, **settings()), want, "a score")
    expected = torch.autograd.grad(want, (x, weight), grad)
    for a, b in zip(torch.autograd.grad(found, (x, weight), grad), expected):
        assert (a - b).float().norm() <= 4e-3 * b.float().norm()
