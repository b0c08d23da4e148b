"""Gradients of causal attention on the CPU: deterministic, with no claim on bits across layouts."""

from __future__ import annotations

import torch

_QUERIES = 256  # queries per step; bounds the [G, rows, keys] matrices of a long sequence


def attention_grad(grad, q, k, v, cu_seqlens, out, lse, scale):
    """Gradients (q, k, v) of :func:`isoexec.ops.attention.varlen`, from its output and log-sum-exp.

    Args:
        grad, q, out: [T, H, K] bf16; k, v: [T, G, K] bf16; cu_seqlens: [B + 1]; lse: [T, H] fp32.

    The probabilities are recomputed in fp32: P = exp(scale q k^T - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = scale dS K, dK = scale dS^T Q.
    """
    G = k.shape[1]
    grad_q, grad_k, grad_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    bounds = cu_seqlens.tolist()
    for start, stop in zip(bounds, bounds[1:]):
        keys, values = (x[start:stop].float().transpose(0, 1) for x in (k, v))
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for first in range(start, stop, _QUERIES):
            last = min(first + _QUERIES, stop)
            visible = last - start
            queries, o, g = (_by_key_head(x[first:last].float(), G) for x in (q, out, grad))
            position = torch.arange(first - start, visible, device=q.device).repeat_interleave(q.shape[1] // G)
            mask = torch.arange(visible, device=q.device) <= position[:, None]
            scores = (queries @ keys[:, :visible].mT) * scale - _by_key_head(lse[first:last, :, None], G)
            p = torch.where(mask, torch.exp(scores), 0.0)
            grad_values[:, :visible] += p.mT @ g
            grad_scores = p * (g @ values[:, :visible].mT - (g * o).sum(-1, keepdim=True)) * scale
            grad_keys[:, :visible] += grad_scores.mT @ queries
            grad_q[first:last] = _by_token(grad_scores @ keys[:, :visible], last - first)
        grad_k[start:stop], grad_v[start:stop] = grad_keys.transpose(0, 1), grad_values.transpose(0, 1)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _by_key_head(x_THK, G):
    """[T, H, K] -> [G, T * H / G, K]."""
    return x_THK.unflatten(1, (G, -1)).transpose(0, 1).flatten(1, 2)


def _by_token(x_GRK, tokens):
    """[G, T * H / G, K] -> [T, H, K]."""
    return x_GRK.unflatten(1, (tokens, -1)).transpose(0, 1).flatten(1, 2)
