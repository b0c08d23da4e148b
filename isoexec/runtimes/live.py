"""Processes that run under a contract right now: each leaves a note when it builds a model; ``isoexec contract status --live`` reads them.

Beside its note a process answers, at any time, what has served each op so far: a thread that waits at a socket. All of it is evidence for a
person who looks in from outside; nothing is decided by it. Notes and sockets lie in a folder of this user's alone, on this machine, and go
with their process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from isoexec.contract import ContractError, ExecutionContract, Identity
from isoexec.contract.canonical import LARGEST_TEXT
from isoexec.ops._core import registry
from isoexec.runtimes import evidence

_ANSWER = 5.0  # seconds that a busy process has


class Live(NamedTuple):
    """A process: its number, seconds since its note, the identity that it had then, and [op, case, implementation, calls so far].

    ``served`` is None where it does not answer.
    """

    pid: int
    age: float
    identity: Identity
    served: list[list] | None


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
        answering = note.with_suffix(".sock")
        if not answering.exists():  # once for a process, however many models it builds
            _answer(answering)
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
            _unlink(note)
            continue
        with open(note, encoding="utf-8") as file:
            text = file.read(LARGEST_TEXT + 1)
        try:
            identity = Identity.from_json(text)
        except ContractError as error:
            raise ContractError(f"{note}: {error}; remove it") from None
        found.append(Live(int(pid), time.time() - note.stat().st_mtime, identity, _asked(note.with_suffix(".sock"))))
    return sorted(found, key=lambda live: live.pid)


def _answer(place: Path) -> None:
    """Tell everyone who connects what has served each op so far."""
    server = socket.socket(socket.AF_UNIX)
    with _short(place) as name:
        server.bind(name)
    server.listen()

    def serve():
        while True:
            with contextlib.suppress(OSError), server.accept()[0] as connection:
                connection.sendall(json.dumps([[*key, calls] for key, calls in registry.served().items()]).encode())

    threading.Thread(target=serve, name="isoexec-live", daemon=True).start()


def _asked(place: Path) -> list[list] | None:
    """What the process at ``place`` answers; None if it does not."""
    try:
        with _short(place) as name, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER)
            connection.connect(name)
            with connection.makefile("rb") as answer:
                return json.loads(answer.read(LARGEST_TEXT))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _short(place: Path) -> Iterator[str]:
    """The path by a descriptor of its folder: the kernel takes no more than 107 bytes for a socket."""
    descriptor = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{place.name}"
    finally:
        os.close(descriptor)


def _started(pid: int) -> str | None:
    """When the kernel started the process, in its ticks; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except OSError:
        return None


def _remove(note: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child inherits the registration
        _unlink(note)


def _unlink(note: Path) -> None:
    for place in (note, note.with_suffix(".sock")):
        place.unlink(missing_ok=True)
