"""DAPO's soft overlong punishment (Yu et al., 2025, equation 13)."""

from __future__ import annotations


def overlong_penalty(length: int, longest: int, buffer: int, factor: float) -> float:
    """What is added to the reward of a response.

    Args:
        length: of the response, in tokens.
        longest: that a response may have.
        buffer: tokens before ``longest`` within which the punishment grows linearly; 0 switches it off.
        factor: full punishment, at ``longest``.

    Returns:
        0.0 for a response that leaves the buffer free, ``-factor`` for one of ``longest`` tokens or more.
    """
    if buffer <= 0:
        return 0.0
    return -factor * min(max(length - (longest - buffer), 0) / buffer, 1.0)
