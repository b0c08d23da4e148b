"""Entries of the launch table as a launch takes them."""

from __future__ import annotations

from isoexec.ops._core.triton_math import COMPILE
from isoexec.ops.gdn.launch import settings


def split(entry: dict[str, int]) -> tuple[dict[str, int], dict]:
    """Settings -> what the kernel or its grid takes, compile options."""
    options = {k: v for k, v in entry.items() if k.startswith("num_") or k == "maxnreg"}
    return {k: v for k, v in entry.items() if k not in options}, {**options, **COMPILE}


def configured(kernel: str, chunk: int | None = None, V: int | None = None, K: int | None = None) -> tuple[dict[str, int], dict]:
    """`split` of the table's entry (launch.settings)."""
    return split(settings(kernel, chunk, V, K))


def limit(name: str) -> int:
    return settings("limits")[name]


def cut(channels: int, most: int) -> int:
    """``most``, halved until it divides ``channels``."""
    while channels % most:
        most //= 2
    return most
