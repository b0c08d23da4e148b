"""Drawing a token, CPU backend."""

from __future__ import annotations

import torch

from isoexec.ops._core import math

_GREEDY_BELOW = 1e-5  # vLLM's own threshold; its SamplingParams raises anything in (0, 0.01) to 0.01


def draw(logprobs, generators):
    race = math.exp(logprobs)
    for row, generator in enumerate(generators):
        if generator is not None:
            race[row] /= torch.empty_like(race[row]).exponential_(generator=generator)
    return race.argmax(-1)


def split_greedy(temperature):
    greedy = temperature < _GREEDY_BELOW
    return greedy, torch.where(greedy, torch.ones_like(temperature), temperature)


def first_maximum(logits):
    return logits.argmax(-1)
