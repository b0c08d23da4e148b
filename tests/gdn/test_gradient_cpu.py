"""Gradients of the trainer path on the CPU, against fp64 autograd of the token recurrence."""

import pytest
import torch

from isoexec.ops import gdn
from tests.gdn.cases import inputs, one_shot
from tests.gdn.gradient_cases import NAMES, recurrence_gradients
from tests.ops.op_checks import same_bits


@pytest.mark.parametrize("form", sorted(gdn.POOLS))
@pytest.mark.parametrize("lengths", [[1], [16], [40], [17, 0, 5, 33]])
def test_gradients_against_fp64_autograd(form, lengths):
    x = inputs(lengths, H=1, HV=2)
    weight = torch.randn(x[2].shape, generator=torch.Generator().manual_seed(1))
    leaves = [t.clone().requires_grad_() for t in x]
    grads = torch.autograd.grad((one_shot(leaves, lengths, form=form) * weight).sum(), leaves)

    def check(exact):
        for name, ours, e in zip(NAMES, grads, exact, strict=True):
            bound = 3e-3 if ours.dtype == torch.bfloat16 else 1e-5
            assert float((ours.double() - e).norm()) <= bound * float(e.norm()), name  # a single token's decay has no effect: exactly zero

    check(recurrence_gradients(x, lengths, weight))
    with pytest.raises(AssertionError, match="^q"):  # a scale that is 1 percent off is another gradient
        check(recurrence_gradients(x, lengths, weight * 1.01))


def test_two_backward_runs_are_equal():
    x = inputs([37])
    leaves = [t.clone().requires_grad_() for t in x]
    runs = []
    for _ in range(2):
        runs.append(torch.autograd.grad(one_shot(leaves, [37]).square().sum(), leaves))
    for a, b in zip(*runs):
        same_bits(a, b, "gradient")
