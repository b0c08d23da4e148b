"""What a loss sees of the importance ratio."""

from __future__ import annotations

import torch


def with_ratio(policy_loss):
    """``policy_loss`` with the extremes of two ratios among its metrics.

    ``ratio``: the importance ratio, to the probabilities that the trainer scored the batch with. ``rollout_ratio``: to those that the
    engine sampled with. An extreme is 1.0 exactly when every ratio is: they are taken in fp64 from the fp32 logprobs, so that equal bits
    alone give 1.
    """

    def measured(log_probs, old_log_probs, advantages, *, config, loss_mask=None, rollout_logprobs=None):
        loss, metrics = policy_loss(
            log_probs, old_log_probs, advantages, config=config, loss_mask=loss_mask, rollout_logprobs=rollout_logprobs
        )
        with torch.no_grad():
            metrics = metrics | _extremes("ratio", log_probs, old_log_probs, loss_mask)
            if rollout_logprobs is not None:
                metrics |= _extremes("rollout_ratio", log_probs, rollout_logprobs, loss_mask)
        return loss, metrics

    return measured


def _extremes(name: str, ours: torch.Tensor, theirs: torch.Tensor, mask: torch.Tensor | None) -> dict[str, float]:
    """Least and greatest exp(ours - theirs) of the tokens in ``mask``; 1.0 where there is none."""
    ratio = (ours.double() - theirs.double()).exp()
    ratio = ratio if mask is None else ratio[mask > 0]
    return {f"{name}_{kind}": found(ratio).item() if ratio.numel() else 1.0 for kind, found in (("min", torch.min), ("max", torch.max))}
