"""Rollout logprobs against the trainer's: over bit patterns, at full precision."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch


class RolloutMismatch(RuntimeError):
    """A token's two logprobs differ, so the importance ratio of its first update is not 1.

    Attributes:
        folder: what :func:`write_bundle` wrote, and both sides' weights.
    """

    def __init__(self, message: str, folder: Path):
        super().__init__(message)
        self.folder = folder


class NotFinite(RuntimeError):
    """A token's logprob is NaN or infinite on a side, be its bits equal on both."""


@dataclass(frozen=True)
class Mismatch:
    """Of the tokens of a step that are trained on.

    Attributes:
        tokens: compared.
        equal: with equal bits.
        mean, max, std: of the absolute difference, in fp64; 0.0 where no token is compared.
        first: (sequence, position in the response) of the first token that differs, or None.
        not_finite: the same of the first token with a logprob that is NaN or infinite.
    """

    tokens: int
    equal: int
    mean: float
    max: float
    std: float
    first: tuple[int, int] | None
    not_finite: tuple[int, int] | None

    @property
    def bit_equal(self) -> float:
        """Share of tokens with equal bits; 1.0 where no token is compared."""
        return self.equal / self.tokens if self.tokens else 1.0


def compare(rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor) -> Mismatch:
    """Compare two [B, S] fp32 tensors of logprobs where ``mask`` [B, S] is more than 0.

    Raises:
        TypeError: a side is not fp32; a cast would round.
    """
    for side, values in (("rollout", rollout), ("trainer", trainer)):
        if values.dtype != torch.float32:
            raise TypeError(f"{side} logprobs: expected torch.float32, found {values.dtype}; compare them before they are rounded")
    chosen = mask > 0
    ours, theirs = rollout[chosen].contiguous(), trainer[chosen].contiguous()
    equal = ours.view(torch.int32) == theirs.view(torch.int32)
    distance = (ours.double() - theirs.double()).abs()
    where = chosen.nonzero()
    differing = where[~equal].tolist()
    not_finite = where[~(ours.isfinite() & theirs.isfinite())].tolist()
    return Mismatch(
        tokens=ours.numel(),
        equal=int(equal.sum()),
        mean=distance.mean().item() if ours.numel() else 0.0,
        max=distance.max().item() if ours.numel() else 0.0,
        std=distance.std().item() if ours.numel() > 1 else 0.0,
        first=tuple(differing[0]) if differing else None,
        not_finite=tuple(not_finite[0]) if not_finite else None,
    )


def write_bundle(folder: Path, batch, found: Mismatch, **about) -> str:
    """Write ``folder/mismatch.json``: what is needed to compute the first differing sequence again (``isoexec trace run --mismatch``).

    Args:
        batch: SkyRL ``TrainingInputBatch`` with both sides' logprobs.
        found: with a ``first``.
        about: JSON values that are kept beside it.

    Returns:
        The differing token in words.
    """
    row, position = found.first
    attended = batch["attention_mask"][row].bool()
    tokens = batch["sequences"][row]
    start = tokens.shape[0] - batch["response_mask"].shape[1]
    rollout, trainer = batch["rollout_logprobs"][row], batch["action_log_probs"][row]
    bundle = about | {
        "sequence": row,
        "tokens": tokens[attended].tolist(),
        "prompt_tokens": int(attended[:start].sum()),
        "differs_at": int(attended[: start + position].sum()),
        "mask": batch["loss_mask"][row].tolist(),
        "rollout_bits": _bits(rollout),
        "trainer_bits": _bits(trainer),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mismatch.json").write_text(json.dumps(bundle))
    ours, theirs = rollout[position].item(), trainer[position].item()
    return f"sequence {row}, token {bundle['differs_at']} (id {int(tokens[start + position])}): rollout {ours!r}, trainer {theirs!r}"


def _bits(values: torch.Tensor) -> list[int]:
    return values.contiguous().view(torch.int32).tolist()
