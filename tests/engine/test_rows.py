"""Digests of rows travel through vLLM's own path of logprobs."""

import pytest
import torch

from isoexec.ops._core.bits import nudge, row_digests
from isoexec.runtimes.vllm import rows


@pytest.mark.parametrize("digest", ["0" * 16, "f" * 16, "0123456789abcdef", "80000000ffffff7f"])
def test_words_hold_the_digest(digest):
    words = rows.to_words(digest)
    assert all(-(2**31) <= word < 2**31 for word in words) and rows.from_words(words) == digest


def test_other_columns_are_no_digest():
    with pytest.raises(ValueError, match="0 words behind a sampled token, expected the 2"):
        rows.from_words([])


def test_the_hook_digests_the_row_that_vllm_sorted():
    pytest.importorskip("vllm")
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.sampler import Sampler

    logprobs = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    sampled = torch.tensor([3, 0, 32, 7, 7])

    class Sampled(torch.nn.Module):
        def forward(self, values, count):
            return SamplerOutput(sampled[:, None].int(), Sampler.gather_logprobs(values, count, sampled))

    sampler = Sampled()
    with rows.carried_digests(sampler, 33):
        whole = sampler(logprobs, 33).logprobs_tensors
        moved = sampler(nudge(logprobs, 2 * 33 + 5), 33).logprobs_tensors.logprob_token_ids[:, 1:].tolist()
        assert sampler(logprobs, 2).logprobs_tensors.logprobs.shape == (5, 3)  # the largest two: nothing to digest
    assert whole.logprob_token_ids[:, 0].tolist() == sampled.tolist()
    assert torch.equal(whole.logprobs[:, 0], logprobs.gather(1, sampled[:, None])[:, 0])
    carried = [rows.from_words(words) for words in whole.logprob_token_ids[:, 1:].tolist()]
    assert carried == row_digests(logprobs)
    assert [rows.from_words(words) == digest for words, digest in zip(moved, carried)] == [True, True, False, True, True]
    assert sampler(logprobs, 33).logprobs_tensors.logprobs.shape == (5, 34)  # afterwards whole rows are whole again
