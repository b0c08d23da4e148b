"""Drawing a token on a GPU: a row's token depends on its logprobs and its generator alone."""

import pytest
import torch

from isoexec.ops.sampling import triton as sampling


def generators(seeds, device):
    return [None if seed is None else torch.Generator(device).manual_seed(seed) for seed in seeds]


def test_a_row_does_not_see_its_batch(device, random):
    for vocabulary in (1, 7, 5001):
        logprobs = random(9, vocabulary, dtype=torch.float32, scale=2.0).log_softmax(-1)
        together = sampling.draw(logprobs, generators(range(9), device))
        order = [4, 0, 8, 3, 1, 7, 2, 6, 5]
        assert sampling.draw(logprobs[order], generators(order, device)).tolist() == together[order].tolist()
        for row in range(9):
            assert sampling.draw(logprobs[row : row + 1], generators([row], device)).item() == together[row]


def test_frequencies(device):
    logprobs = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0], device=device).log()
    rows = 4000 if device.type == "cuda" else 150
    tokens = sampling.draw(logprobs.expand(rows, -1), [torch.Generator(device).manual_seed(3)] * rows)
    counts = tokens.cpu().bincount(minlength=5) / rows
    assert counts[4] == 0
    torch.testing.assert_close(counts, logprobs.exp().cpu(), atol=0.03 if rows == 4000 else 0.13, rtol=0)


def test_a_tail_keeps_its_probability(device):
    """131,072 tokens of 1e-8 are 0.13 % of all draws: noise of 24 bits would never let one win."""
    if device.type != "cuda":
        pytest.skip("a matter of many draws")
    rows, tail = 20000, 1 << 17
    logprobs = torch.full((tail + 1,), 1e-8, device=device)
    logprobs[tail] = 1 - tail * 1e-8
    tokens = sampling.draw(logprobs.log().expand(rows, -1), [torch.Generator(device).manual_seed(3)] * rows)
    found = int((tokens < tail).sum())
    assert 10 <= found <= 50, f"{found} draws from the tail, 26 expected"
    assert tokens[tokens < tail].unique().numel() == found, "which of them is as random"


def test_a_draw_follows_the_state_of_its_generator(device):
    logprobs = torch.zeros(1, 5000, device=device)
    generator = torch.Generator(device).manual_seed(7)
    first, second = (sampling.draw(logprobs, [generator]).item() for _ in range(2))
    assert first != second
    if device.type == "cuda":  # what vLLM does after a draw that does not count
        assert generator.get_offset() == 8
        generator.set_offset(generator.get_offset() - 4)
        assert sampling.draw(logprobs, [generator]).item() == second
        large = torch.Generator(device).manual_seed((1 << 64) - 1)
        assert sampling.draw(logprobs, [large]).item() not in (first, second)


def test_ties_and_rows_without_generator(device):
    wide = torch.zeros(3, 9000, device=device)
    wide[1, 4097] = wide[1, 8999] = 1.0
    wide[2] = -torch.inf
    assert sampling.first_maximum(wide).tolist() == [0, 4097, 0]
    logprobs = torch.tensor([[-3.0, -1.0, -1.0], [-1.0, -5.0, -2.0]], device=device)
    assert sampling.draw(logprobs, [None, None]).tolist() == [1, 0]
