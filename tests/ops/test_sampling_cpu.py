"""The draw: a row's token depends on its logprobs and its generator alone, and its frequencies are the probabilities."""

import torch

from isoexec.ops import sampling


def generators(seeds):
    return [None if seed is None else torch.Generator().manual_seed(seed) for seed in seeds]


def log_probabilities(rows, vocabulary):
    return torch.randn(rows, vocabulary).mul_(2.0).log_softmax(-1)


def test_a_row_does_not_see_its_batch():
    for vocabulary in (1, 7, 512, 1001):  # odd widths move rows across vector boundaries
        logprobs = log_probabilities(9, vocabulary)
        seeds = list(range(9))
        together = sampling.draw(logprobs, generators(seeds))
        order = [4, 0, 8, 3, 1, 7, 2, 6, 5]
        permuted = sampling.draw(logprobs[order], generators(order))
        assert permuted.tolist() == together[order].tolist()
        for row in range(9):
            assert sampling.draw(logprobs[row : row + 1], generators([row])).item() == together[row]


def test_frequencies():
    logprobs = torch.tensor([0.5, 0.25, 0.125, 0.125, 0.0]).log()
    generator = torch.Generator().manual_seed(3)
    rows = 4000
    tokens = sampling.draw(logprobs.expand(rows, -1), [generator] * rows)
    counts = tokens.bincount(minlength=5) / rows
    assert counts[4] == 0
    torch.testing.assert_close(counts, logprobs.exp(), atol=0.03, rtol=0)


def test_one_row_of_noise_per_call():
    logprobs = log_probabilities(2, 64)
    a, b = generators([1, 1])
    first = [sampling.draw(logprobs[:1], [a]).item() for _ in range(20)]
    second = [sampling.draw(logprobs, [b, None])[0].item() for _ in range(20)]
    assert first == second
    assert len(set(first)) > 1
    assert a.get_state().equal(b.get_state())


def test_a_row_without_generator_takes_the_most_likely():
    logprobs = torch.tensor([[-3.0, -1.0, -1.0], [-1.0, -5.0, -2.0]])
    assert sampling.draw(logprobs, [None, None]).tolist() == [1, 0]


def test_greedy_rows():
    temperature = torch.tensor([0.0, 1e-6, 1e-5, 0.01, 1.0])
    greedy, divisor = sampling.split_greedy(temperature)
    assert greedy.tolist() == [True, True, False, False, False]
    assert divisor.view(torch.int32).tolist() == torch.tensor([1.0, 1.0, 1e-5, 0.01, 1.0]).view(torch.int32).tolist()


def test_the_first_of_equal_maxima():
    logits = torch.full((3, 1001), -1.0)
    logits[0, [7, 1000]] = logits[1, [999, 3, 500]] = 2.0
    assert sampling.first_maximum(logits).tolist() == [7, 3, 0]
