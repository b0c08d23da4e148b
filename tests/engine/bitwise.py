"""What two rollouts must share."""

from __future__ import annotations

import struct


def bits(rollout):
    """Tokens, bit patterns of their logprobs and digests of the whole rows."""
    return rollout.tokens, [struct.pack("<f", x) for x in rollout.logprobs], rollout.row_digests


def same(one, other):
    """Per sequence: whether both rollouts agree in every bit. Both must carry digests."""
    assert len(one) == len(other) > 0
    assert all(r.row_digests is not None for r in (*one, *other))
    return [bits(a) == bits(b) for a, b in zip(one, other)]
