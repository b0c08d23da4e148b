"""Drawing a token on a GPU: a row's token depends on its logprobs and its generator alone."""

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


def test_ties_and_rows_without_generator(device):
    wide = torch.zeros(3, 9000, device=device)
    wide[1, 4097] = wide[1, 8999] = 1.0
    wide[2] = -torch.inf
    assert sampling.first_maximum(wide).tolist() == [0, 4097, 0]
    logprobs = torch.tensor([[-3.0, -1.0, -1.0], [-1.0, -5.0, -2.0]], device=device)
    assert sampling.draw(logprobs, [None, None]).tolist() == [1, 0]
