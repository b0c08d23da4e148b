"""The ratios that a loss reports beside its own metrics."""

import pytest
import torch

from isoexec.runtimes.skyrl.ratio import with_ratio


def metrics(ours, scored, rollout, mask):
    loss = with_ratio(lambda *args, **kwargs: (torch.zeros(()), {"own": 1.0}))
    return loss(ours, scored, torch.zeros_like(ours), config=None, loss_mask=mask, rollout_logprobs=rollout)[1]


def test_equal_bits_and_nothing_else_give_one():
    torch.manual_seed(0)
    ours, mask = -8 * torch.rand(3, 5), torch.ones(3, 5)
    mask[1, 2] = 0
    found = metrics(ours, ours.clone(), ours.clone(), mask)
    assert found == {"own": 1.0} | dict.fromkeys(("ratio_min", "ratio_max", "rollout_ratio_min", "rollout_ratio_max"), 1.0)
    planted = ours.clone()
    planted.view(torch.int32)[1, 2] += 1  # not trained on
    assert metrics(ours, planted, planted, mask)["ratio_max"] == 1.0
    planted.view(torch.int32)[0, 4] += 1
    found = metrics(ours, ours, planted, mask)
    assert found["ratio_min"] == found["ratio_max"] == 1.0 and found["rollout_ratio_max"] > 1.0
    found = metrics(ours, planted, ours, mask)
    assert found["ratio_max"] > 1.0 and found["rollout_ratio_max"] == 1.0


@pytest.mark.parametrize("mask", [None, torch.zeros(1, 2)])
def test_no_mask_is_every_token_and_no_token_is_one(mask):
    found = metrics(torch.zeros(1, 2), -torch.ones(1, 2), None, mask)
    assert found["ratio_max"] == (1.0 if mask is not None else pytest.approx(2.71828, rel=1e-5)) and "rollout_ratio_max" not in found
