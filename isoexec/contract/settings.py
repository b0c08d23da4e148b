"""Settings that keep a contract, as tables: a path, the values allowed, and what another value would do."""

from __future__ import annotations

import functools
from typing import Iterable, NamedTuple

from isoexec.contract.errors import ContractError

#: Reasons that many settings share.
UNROUTED = "arithmetic outside the op library"
UNPROVEN = "its bits are not proven"


class Setting(NamedTuple):
    """An attribute path, the values that keep the contract and what another value would do."""

    path: str
    allowed: tuple
    otherwise: str


def check_settings(settings: Iterable[Setting], root, where: str = "", advice: str = "") -> None:
    """Refuse the first setting whose value is not allowed; ``True`` is not 1.

    Args:
        settings: what to look at.
        root: object or mapping in which the paths begin.
        where: text before the setting's name, e.g. the file that holds it.
        advice: what to do, where it is not to set the first allowed value.

    Raises:
        ContractError: names the setting, what was expected, what was found, what it would do and what to do.
    """
    for setting in settings:
        found = functools.reduce(_step, setting.path.split("."), root)
        if not any(found is value or (type(found) is type(value) and found == value) for value in setting.allowed):
            expected = " or ".join(map(_name, setting.allowed))
            to_do = advice or f"set it to {_name(setting.allowed[0])}, or unset ISOEXEC_CONTRACT to run upstream's kernels"
            raise ContractError(f"{where}{setting.path}: expected {expected}, found {_name(found)}: {setting.otherwise}; {to_do}")


def _step(value, name: str):
    """Attribute or key ``name``; None where there is none (HF configs leave out what is at its default)."""
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _name(value) -> str:
    return getattr(value, "__name__", None) or repr(value)
