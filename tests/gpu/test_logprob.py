"""Log-softmax and token logprob in Triton."""

import subprocess
import sys

import pytest
import torch

from isoexec.ops._core.bits import assert_bit_equal, bit_equal, nudge
from isoexec.ops import logprob as ops
from isoexec.ops import matmul
from isoexec.ops.logprob import of_hidden, reference
from isoexec.ops.logprob import triton as logprob

SHAPES = [(200, 200), (9000, 8900)]


def _call(module, logits, tokens, vocab):
    return module.token_logprob(logits, tokens, vocab_size=vocab, vocab_block=64)


@pytest.mark.parametrize("V,vocab", SHAPES)
def test_token_is_the_entry_of_the_row(random, device, V, vocab, monkeypatch):
    logits = random(4, V, dtype=torch.float32, scale=8.0)
    logits[:, vocab:] = torch.nan  # padding must not matter, whatever it holds
    tokens = torch.tensor([0, vocab - 1, 17, 130], device=device)
    rows = logprob.log_softmax(logits, vocab_size=vocab, vocab_block=64)
    assert_bit_equal(_call(logprob, logits, tokens, vocab), rows.gather(1, tokens[:, None]).squeeze(1))
    assert (rows[:, vocab:] == -torch.inf).all()
    want = torch.log_softmax(logits[:, :vocab].double(), -1)
    assert (rows[:, :vocab] - want).abs().max() < 4e-6
    assert_bit_equal(_call(logprob, logits[2:3], tokens[2:3], vocab), _call(logprob, logits, tokens, vocab)[2:3], "a row alone")
    y = _call(logprob, logits, tokens, vocab)
    with monkeypatch.context() as patch:
        patch.setattr(logprob, "_SUMS_BYTES", 8 * -(-V // 64))
        assert_bit_equal(_call(logprob, logits, tokens, vocab), y, "two tokens at a time")
        assert_bit_equal(logprob.log_softmax(logits, vocab_size=vocab, vocab_block=64), rows, "rows of two tokens at a time")
    assert not bit_equal(y, nudge(y, 2))
    assert not bit_equal(_call(logprob, nudge(logits, 17 + 2 * V, 64), tokens, vocab), y)


def test_what_is_kept_is_each_row_s_maximum_and_sum(random, device):
    logits, kept = random(3, 300, dtype=torch.float32, scale=9.0), []
    logits[:, 290:] = torch.nan  # padding
    tokens = torch.tensor([0, 289, 17], device=device)
    y = logprob.token_logprob(logits, tokens, vocab_size=290, vocab_block=64, keep=lambda *found: kept.extend(found))
    maximum, total = kept
    assert_bit_equal(maximum, logits[:, :290].amax(1), "maxima")
    exact = torch.exp(logits[:, :290].double() - maximum[:, None].double()).sum(1)
    assert ((total.double() - exact).abs() <= 2.0**-20 * exact).all()
    assert_bit_equal(_call(logprob, logits, tokens, 290), y, "with and without")
    assert not bit_equal(nudge(maximum, 1), logits[:, :290].amax(1))


def test_block_sums_are_the_schedule_s(random):
    """Same trees as the CPU backend: with exp taken once, the sums agree bit for bit."""
    x = random(3, 200, dtype=torch.float32)
    zero = torch.zeros(3, 1, dtype=torch.float32, device=x.device)
    sums = logprob._block_sums(x, zero, 199, 64)
    e = torch.nn.functional.pad(torch.exp(x[:, :199]), (0, 57)).view(3, 4, 64)
    assert (sums - e.sum(-1)).abs().max() <= 1e-6 * e.sum(-1).max()
    assert_bit_equal(logprob._totals(sums, zero)[0].cpu(), reference._normaliser(sums.cpu()))


@pytest.mark.parametrize("temperature", [0.7, [0.5, 1.0, 1.3]])
def test_temperature(random, device, temperature):
    logits = random(3, 300, dtype=torch.float32, scale=9.0)
    logits[0, 0] = 2.0**-127  # subnormal
    t = torch.tensor(temperature, dtype=torch.float32)
    y = logprob.scale_by_temperature(logits, t.to(device))
    assert_bit_equal(y.cpu(), reference.scale_by_temperature(logits.cpu(), t))
    leaf = logits.requires_grad_()
    (g,) = torch.autograd.grad(logprob.scale_by_temperature(leaf, t.to(device)), leaf, torch.ones_like(logits))
    assert_bit_equal(g[:, 0].cpu(), (1.0 / t).expand(3).contiguous())


@pytest.mark.parametrize("V,vocab", SHAPES[:1])
def test_gradient(random, device, V, vocab):
    logits, grad = random(3, V, dtype=torch.float32, scale=3.0), random(3, dtype=torch.float32)
    tokens = torch.tensor([5, vocab - 1, 64], device=device)
    leaf, host = logits.clone().requires_grad_(), logits.cpu().requires_grad_()
    (got,) = torch.autograd.grad(_call(logprob, leaf, tokens, vocab), leaf, grad)
    (want,) = torch.autograd.grad(_call(reference, host, tokens.cpu(), vocab), host, grad.cpu())
    assert (got.cpu() - want).abs().max() <= 2e-6
    (again,) = torch.autograd.grad(_call(logprob, leaf, tokens, vocab), leaf, grad)
    assert_bit_equal(got, again, "gradient of a second run")


def test_a_token_outside_the_vocabulary_stops_the_device(hardware):
    """In a process of its own: the assertion ends its use of the GPU."""
    code = (
        "import torch; from isoexec.ops import logprob; x = torch.zeros(2, 128, device='cuda');"
        "logprob.token_logprob(x, torch.tensor([1, {}], device='cuda'), vocab_size=100, vocab_block=64); torch.cuda.synchronize()"
    )
    good, bad = (subprocess.run([sys.executable, "-c", code.format(t)], capture_output=True, text=True, timeout=120) for t in (99, 100))
    assert good.returncode == 0, good.stderr
    assert bad.returncode != 0 and "outside the vocabulary" in bad.stderr + bad.stdout


def test_memory_of_32768_tokens_of_a_vocabulary_of_248320(hardware):
    """Beside the logits, forward takes less than 256 MB; beside the logits and their gradient, backward does."""
    T, V, limit = 32768, 248320, 256 << 20
    logits = torch.empty(T, V, dtype=torch.float32, device=hardware).normal_().requires_grad_()
    tokens, grad = torch.arange(T, device=hardware) * 7 % V, torch.ones(T, device=hardware)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = _call(logprob, logits, tokens, V)
    forward = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    (g,) = torch.autograd.grad(y, logits, grad)
    backward = torch.cuda.max_memory_allocated() - before - g.nbytes
    print(f"peak beside inputs and outputs: forward {forward / 2**20:.1f} MB, backward {backward / 2**20:.1f} MB")
    assert 0 < forward < limit and backward < limit
    rows = [0, 17, T - 1]
    assert_bit_equal(_call(logprob, logits.detach()[rows], tokens[rows], V), y.detach()[rows], "rows alone")
    assert_bit_equal(g.argmax(1)[rows], tokens[rows])


def _head(device, T, V, D):
    generator = torch.Generator(device).manual_seed(T)
    x, weight = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in ((T, D), (V, D)))
    tokens, temperature = torch.arange(T, device=device) * 7 % (V - 20), torch.tensor(0.7, device=device)
    return x.requires_grad_(), weight.div_(D**0.5).requires_grad_(), tokens, temperature


def _rows(x, weight, tokens, temperature, **sizes):
    return ops.token_logprob(ops.scale_by_temperature(matmul.lm_head(x, weight), temperature), tokens, **sizes)


def test_from_hidden_states_by_tiles(hardware, monkeypatch):
    """The bits of the rows of logits, in a tile of a few rows; gradients in tiles of rows and of columns."""
    T, V, D = 700, 3000, 256
    x, weight, tokens, temperature = _head(hardware, T, V, D)
    sizes, grad = dict(vocab_size=V - 20, vocab_block=64), torch.linspace(-1, 1, T, device=hardware)
    want = _rows(x, weight, tokens, temperature, **sizes)
    monkeypatch.setattr(of_hidden, "LOGIT_BYTES", 1 << 20)
    got = of_hidden.of_hidden(x, weight, tokens, temperature, **sizes)
    assert_bit_equal(got, want)
    moved = of_hidden.of_hidden(nudge(x.detach(), 3 * D + 5, 64), weight, tokens, temperature, **sizes)
    assert not bit_equal(moved[3:4], want[3:4])
    assert_bit_equal(moved[4:], want[4:], "other rows")
    gradients, again = (torch.autograd.grad(y, (x, weight), grad, retain_graph=True) for y in (got, got))
    for a, b, c in zip(gradients, torch.autograd.grad(want, (x, weight), grad), again):
        assert (a - b).float().norm() <= 5e-3 * b.float().norm()
        assert_bit_equal(a, c, "gradient of a second run")


def test_memory_of_32768_hidden_states_and_a_vocabulary_of_248320(hardware):
    """No logits are held: beside inputs, results and gradients both directions take less than 256 MB."""
    T, V, limit = 32768, 248320, 256 << 20
    x, weight, tokens, temperature = _head(hardware, T, V, 2048)
    sizes = dict(vocab_size=V, vocab_block=64)
    of_hidden.of_hidden(x[:8], weight, tokens[:8], temperature, **sizes)  # workspaces of libraries
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = of_hidden.of_hidden(x, weight, tokens, temperature, **sizes)
    forward = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    backward = torch.cuda.max_memory_allocated() - before - sum(g.nbytes for g in grads)
    print(f"peak beside inputs and outputs: forward {forward / 2**20:.1f} MB, backward {backward / 2**20:.1f} MB")
    assert 0 < forward < limit and backward < limit
    rows = [0, 17, T - 1]
    assert_bit_equal(_rows(x.detach()[rows], weight.detach(), tokens[rows], temperature, **sizes), y.detach()[rows], "rows alone")
