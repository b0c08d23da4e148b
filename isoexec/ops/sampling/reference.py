"""Drawing a token, CPU backend."""

from __future__ import annotations

import torch

from isoexec.ops._core import math


def draw(logprobs, generators):
    race = math.exp(logprobs)
    for row, generator in enumerate(generators):
        if generator is not None:
            race[row] /= torch.empty_like(race[row]).exponential_(generator=generator)
    return race.argmax(-1)
