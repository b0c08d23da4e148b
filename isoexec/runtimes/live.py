"""Processes that run under a contract right now: each leaves a note when it builds a model; ``isoexec contract status --live`` reads them.

A note is evidence for a person who looks in from outside; nothing is decided by it. Notes lie in a folder of this user's alone, on this
machine, and go with their process.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from isoexec.contract import ContractError, ExecutionContract, Identity
from isoexec.contract.canonical import LARGEST_TEXT
from isoexec.runtimes import evidence


class Live(NamedTuple):
    """A process: its number, seconds since its note, and the identity that it had then."""

    pid: int
    age: float
    identity: Identity


def folder() -> Path:
    """Of the notes.

    Raises:
        ContractError: another user owns it, or others may write to it.
    """
    place = Path(tempfile.gettempdir(), f"isoexec-{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or place.is_symlink():
        raise ContractError(f"{place}: expected a folder of this user's alone, found another; remove it")
    return place


def publish(contract: ExecutionContract, role: str) -> None:
    """Leave a note about this process; one that cannot be written is none: the run does not depend on it."""
    try:
        note = folder() / f"{os.getpid()}-{_started(os.getpid())}.json"
        scratch = note.with_suffix(".part")
        scratch.write_text(evidence.identity(contract, role).to_json(), encoding="utf-8")
        os.replace(scratch, note)
    except (OSError, ContractError):
        return
    atexit.register(_remove, note, os.getpid())


def processes() -> list[Live]:
    """Every live process that has left a note, by number; notes of processes that are gone are removed.

    Raises:
        ContractError: a note is no identity.
    """
    found = []
    for note in folder().glob("*.json"):
        pid, _, started = note.stem.partition("-")
        if not pid.isdecimal() or _started(int(pid)) != started:  # numbers are used again
            note.unlink(missing_ok=True)
            continue
        with open(note, encoding="utf-8") as file:
            text = file.read(LARGEST_TEXT + 1)
        try:
            identity = Identity.from_json(text)
        except ContractError as error:
            raise ContractError(f"{note}: {error}; remove it") from None
        found.append(Live(int(pid), time.time() - note.stat().st_mtime, identity))
    return sorted(found)


def _started(pid: int) -> str | None:
    """When the kernel started the process, in its ticks; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


def _remove(note: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the registration
        note.unlink(missing_ok=True)
