"""What can be said against command-line arguments before anything is imported or started."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from isoexec.contract import ContractError, contract_for_model, read_config
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
