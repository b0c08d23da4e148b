"""Megatron adapter: what patched megatron-core calls.

Without a contract every function here hands back what upstream gave it. Nothing of megatron-core is imported until a contract is
active, since megatron-core imports this package.
"""

from __future__ import annotations

import contextlib
import functools
import inspect

import torch

from isoexec.contract import ContractError, active_contract
from isoexec.ops._core import registry


def decoder_spec(config, spec, vp_stage=None, pg_collection=None):
    """The decoder that ``GPTModel`` builds: ``spec`` itself, or under a contract the layers that run isoexec's models.

    Args:
        config: Megatron ``TransformerConfig``.
        spec: layer or block spec that the caller asked for.
        vp_stage: virtual pipeline stage or None.
        pg_collection: Megatron ``ProcessGroupCollection``.

    Raises:
        ContractError: the model, or a setting of it, is outside the contract.
    """
    contract = active_contract()
    if contract is None:
        return spec
    from isoexec.runtimes.megatron import settings
    from isoexec.runtimes.megatron import spec as iso

    settings.activate(contract, config)
    return iso.decoder_spec(contract, config, vp_stage, pg_collection)


def module(cls: type) -> type:
    """The class that ``GPTModel`` builds in place of ``cls``: ``cls`` itself without a contract."""
    if active_contract() is None:
        return cls
    from isoexec.runtimes.megatron import modules

    return modules.replacement(cls)


def rotary_channels(config) -> int:
    """Channels of the rotary table that ``GPTModel`` makes for all layers; 0: it makes none.

    Upstream's latent attention makes a table in each layer; under a contract its layers take the model's as all others do.
    """
    if not config.multi_latent_attention:
        return config.kv_channels
    return 0 if active_contract() is None else config.qk_pos_emb_head_dim


def expert_bias_update(update):
    """What moves the experts' bias when gradients are complete: ``update`` itself, or under a contract the op."""
    if active_contract() is None:
        return update
    from isoexec.runtimes.megatron import moe

    return moe.updated_expert_bias


#: Arguments of ``GPTModel.forward`` that would bring in arithmetic the contract does not cover, and what to do instead.
_REFUSED_ARGUMENTS = {
    "labels": "take logprobs from the logits with isoexec.ops.logprob",
    "attention_mask": "attention is causal within the sequences of packed_seq_params",
    "inference_context": "generate with the rollout engine",
    "inference_params": "generate with the rollout engine",
}


def attributed(forward):
    """Decorate ``GPTModel.forward``: its ops count for trainer_forward or, without gradients, trainer_score.

    A case that the caller has set stays.

    Raises:
        ContractError: an argument that a contract does not cover.
    """
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def attributed_forward(*args, **kwargs):
        if active_contract() is None:
            return forward(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        for name, instead in _REFUSED_ARGUMENTS.items():
            if given.get(name) is not None:
                raise ContractError(f"GPTModel.forward: {name}: expected None, found {type(given[name]).__name__}; {instead}")
        if registry.current_case() is not None:
            return forward(*args, **kwargs)
        with registry.executing("trainer_forward" if torch.is_grad_enabled() else "trainer_score"):
            return forward(*args, **kwargs)

    return attributed_forward


def recomputing():
    """Context of a forward pass that activation recomputation repeats during backward: its ops count for trainer_recompute."""
    return contextlib.nullcontext() if active_contract() is None else registry.executing("trainer_recompute")
