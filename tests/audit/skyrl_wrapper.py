"""SkyRL's model wrapper, as a policy worker drives it, on a real Megatron model."""

from __future__ import annotations

import torch

LENGTHS, RESPONSE, TEMPERATURE = ((3, 5), (7, 2), (1, 6)), 6, 0.7


def wrapped(model: str, out, vocab_size: int, **layout):
    """(a ``PolicyTrainer`` on a checkpoint, the wrapper of its model); a contract is active.

    Args:
        out: folder for the configuration's files.
        layout: of ``PolicyTrainer``.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    from isoexec.contract import active_contract
    from isoexec.runtimes.megatron.trainer import PolicyTrainer
    from isoexec.runtimes.skyrl.config import resolve
    from isoexec.runtimes.skyrl.ratio import with_ratio
    from isoexec.runtimes.skyrl.wrapper import ContractWrapper
    from tests.skyrl.small_run import small_config

    trainer = PolicyTrainer(model, **layout)
    wrapper = ContractWrapper(
        config=resolve(small_config(model, out)).trainer,
        actor_module=[trainer.ddp],
        policy_loss_fn=with_ratio(PolicyLossRegistry.get("dual_clip")),
        contract=active_contract(),
        vocab_size=vocab_size,
        sequence_parallel=trainer.config.sequence_parallel,
    )
    return trainer, wrapper


def batch_of(lengths, longest: int, vocab_size: int) -> dict:
    """Prompts on the left, responses of at most ``longest`` tokens on the right, padding on both ends."""
    generator = torch.Generator().manual_seed(9)
    before = max(prompt for prompt, _ in lengths)
    size = before + longest
    mask = torch.zeros(len(lengths), size, dtype=torch.long)
    for row, (prompt, response) in enumerate(lengths):
        mask[row, before - prompt : before + response] = 1
    loss_mask = mask[:, before:].float()
    old = -torch.rand(len(lengths), longest, generator=generator)
    return {
        "sequences": torch.randint(3, vocab_size, (len(lengths), size), generator=generator) * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "num_actions": longest,
        "old_action_log_probs": old,
        "base_action_log_probs": old,
        "rollout_action_logprobs": old,
        "advantages": torch.randn(old.shape, generator=generator),
        "loss_mask": loss_mask,
        "action_mask": loss_mask.long(),
        "num_microbatches": 1,
    }


def scored(wrapper, batch):
    """[B, longest] fp32 logprobs."""
    with torch.no_grad():
        return wrapper.forward([dict(batch)], batch["sequences"].shape[1], len(batch["sequences"]), temperature=TEMPERATURE)


def trained(wrapper, batch):
    """Metrics of forward and backward; the gradients are the batch's alone."""
    [model], size = wrapper.actor_module, batch["sequences"].shape
    model.zero_grad_buffer()
    [metrics] = wrapper.forward_backward_mini_batch([dict(batch)], size[1], size[0], temperature=TEMPERATURE)
    return metrics
