"""What can be said against command-line arguments before anything is imported or started."""

from __future__ import annotations

import argparse
import math

from isoexec.contract import contract_for_model


def positive(text: str) -> float:
    """A finite number above zero: seconds, a temperature."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, found {text!r}")
    return number


def check_model(folder: str | None) -> None:
    """Refuse a checkpoint before torch is imported, which takes far longer than to read a file.

    Args:
        folder: HF-format checkpoint; None: one will be made.

    Raises:
        ContractError: no contract can be built for it.
    """
    if folder is not None:
        contract_for_model(folder, "cpu")  # widths and entries are judged alike on every backend
