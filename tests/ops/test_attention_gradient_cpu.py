"""Gradients of packed attention, long sequences included."""

import torch

from isoexec.ops import attention
from op_checks import bf16_values, gradients_close
from test_attention_cpu import SCALE, exact, qkv


def test_gradients():
    q, k, v, starts = qkv([70, 0, 1, 33])
    op = lambda q, k, v: attention.varlen(q, k, v, starts, scale=SCALE, kv_block=64)  # noqa: E731
    gradients_close(op, lambda q, k, v: exact(q, k, v, starts), [x.bfloat16() for x in (q, k, v)])


def test_a_sequence_of_several_query_steps():
    q, k, v, starts = qkv([600], 2, 1, 16)
    op = lambda q, k, v: attention.varlen(q, k, v, starts, scale=SCALE, kv_block=64)  # noqa: E731
    gradients_close(op, lambda q, k, v: exact(q, k, v, starts), [x.bfloat16() for x in (q, k, v)])


def test_three_thousand_tokens_fit():
    q, k, v = (bf16_values(3000, h, 16).bfloat16().requires_grad_() for h in (4, 2, 2))
    starts = torch.tensor([0, 3000], dtype=torch.int32)
    out = attention.varlen(q, k, v, starts, scale=0.25, kv_block=64)
    out.float().square().mean().backward()
    assert all(x.grad.isfinite().all() and x.grad.abs().max() > 0 for x in (q, k, v))
