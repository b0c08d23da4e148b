"""Checks that the op tests share. Each equality carries its negative control: one planted ulp must turn it red.

An op that is given fp32 tensors holding bf16 values returns its value before the last rounding; the checks use that, so that two
different fp32 values that round to one bf16 value do not pass as equal.
"""

import re

import pytest
import torch

from isoexec.ops._core.bits import assert_bit_equal, nudge

BATCHES = (1, 2, 3, 8, 17, 31, 32, 33, 64, 65, 257)


def bf16_values(*shape, scale=1.0):
    """fp32 tensor of normal values that bf16 represents."""
    return (torch.randn(*shape) * scale).bfloat16().float()


def same_bits(a, b, what="tensors", index=-1):
    """``a`` equals ``b`` bit for bit, and would not if one element of ``a`` moved by one unit in the last place."""
    assert_bit_equal(a, b, what)
    if a.numel():
        with pytest.raises(AssertionError, match=re.escape(what)):
            assert_bit_equal(nudge(a, index), b, what)


def batch_invariant(op, *rows, what):
    """Row i of ``op`` over N rows equals ``op`` over any other set of rows that holds it; ``rows`` are tensors [257, ...]."""
    whole = op(*rows)
    total = rows[0].shape[0]
    for n in BATCHES:
        chosen = torch.randperm(total)[:n]
        same_bits(op(*(x[chosen] for x in rows)), whole[chosen], f"{what}, {n} rows")


def gradients(out, inputs, seed):
    """Gradients of ``inputs`` for the gradient ``seed`` of ``out``. (torch.autograd.grad with explicit grad_outputs imports sympy: seconds.)"""
    return torch.autograd.grad((out * seed).sum(), inputs)


def gradients_close(op, reference, inputs, tolerance=2e-2):
    """Gradients of ``op`` (bf16 inputs) against autograd of ``reference`` on the same values in fp64.

    The error is measured against the largest gradient of its tensor: bf16 keeps 8 bits.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = op(*leaves), reference(*wide)
    seed = torch.randn_like(expected).to(out.dtype)
    found, again = gradients(out, leaves, seed), gradients(op(*leaves), leaves, seed)
    for i, (g, h, e) in enumerate(zip(found, again, gradients(expected, wide, seed.double()))):
        assert g.dtype == leaves[i].dtype
        same_bits(g, h, f"gradient {i} of a second run")
        error = (g.double() - e).abs().max() / e.abs().max()
        assert error < tolerance, f"gradient {i}: relative error {error:.2e}"
