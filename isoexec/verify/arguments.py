"""What can be said against command-line arguments before anything is imported or started."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from isoexec.contract import ContractError, Numerics, contract_for_model, read_config
from isoexec.contract.architectures import is_hybrid
from isoexec.contract.weights import check_weights
from isoexec.verify.settings import MAX_MODEL_LEN


def positive(text: str) -> float:
    """A finite number above zero: seconds, a temperature."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, found {text!r}")
    return number


def check_limits(prompts: int | None, tokens: int | None) -> None:
    """Refuse limits of ``isoexec verify`` under which its settings would not do what they claim; None: no limit.

    Raises:
        ContractError: names the option.
    """
    for name, value, least in (("prompts", prompts, 16), ("tokens", tokens, 8)):
        if value is not None and value < least:
            raise ContractError(f"--{name} {value}: expected at least {least}, else settings do not exercise what they claim")


def check_numerics(numerics: dict, config: dict | None) -> None:
    """Refuse constants that are none, and those that a model has no use for.

    Args:
        numerics: constants of :class:`Numerics` that the command line names, all of Gated DeltaNet.
        config: HF config of the model, or None.

    Raises:
        ContractError: names the constant, or the architecture.
    """
    Numerics(**numerics)
    if numerics and config is not None and not is_hybrid(config["architectures"][0]):
        options = ", ".join(f"--{name.replace('_', '-')}" for name in numerics)
        raise ContractError(f"{options}: {config['architectures'][0]} has no Gated DeltaNet layers; leave it out")


def dtype_note(config: dict) -> str | None:
    """What to tell of a config whose dtype is not the one that is computed in; None: nothing."""
    for part in (text_config(config), config):
        for name in ("dtype", "torch_dtype"):
            if part.get(name) not in (None, "bfloat16"):
                return f"config.json: {name}: {part[name]!r} is not read: both runtimes compute in bfloat16, and take weights stored in it"
    return None


def check_model(folder: Path | str) -> dict:
    """The HF config of a checkpoint that both runtimes can run; without torch, whose import takes far longer than to read a file.

    Raises:
        ContractError: not an HF folder, an architecture, entry or size that is not covered, weight files that are not there or not whole,
            or too short a context.
    """
    folder = Path(folder)
    config = read_config(folder)
    contract_for_model(folder, "cpu")  # architecture, widths and entries are judged alike on every backend
    text = text_config(config)
    for name, least in (("vocab_size", 8), ("max_position_embeddings", MAX_MODEL_LEN)):
        if not isinstance(text.get(name), int) or text[name] < least:
            raise ContractError(f"model {str(folder)!r}: config.json: {name}: expected at least {least}, found {text.get(name)!r}")
    check_weights(folder)
    return config


def text_config(config: dict) -> dict:
    """The part of an HF config that describes the language model."""
    return config.get("text_config", config)
