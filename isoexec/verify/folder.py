"""The folder that a run writes to: standard library only, so that what is wrong with it is told before a framework is imported."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from isoexec.contract import ContractError


@contextlib.contextmanager
def alone(out: Path, option: str = "--out") -> Iterator[None]:
    """Make ``out`` and hold it against a second run, which would overwrite this one's results and logs.

    Args:
        option: what names the folder on the command line.

    Raises:
        ContractError: it cannot be made or written to, or another run holds it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "w")
    except OSError as error:
        raise ContractError(f"{option} {str(out)!r}: {error.strerror or error}; name a folder that can be written to") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ContractError(f"another run writes to {str(out)!r}; wait for it, or name another folder with {option}") from None
        yield


def check_free(out: Path) -> None:
    """:func:`alone`'s refusals, for a run that will hold ``out`` once its frameworks are imported."""
    with alone(out):
        pass
