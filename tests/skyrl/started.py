"""A run in a process of its own, which a test may watch, kill and look after."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from isoexec.runtimes.skyrl.steps import read_steps

HERE = Path(__file__).parent
_MARK = "ISOEXEC_TEST_RUN"
_LIMIT = 1500  # seconds, on a machine whose cores are taken; half a minute to three on one that is idle


class Run:
    """A started run of ``out``; every process of it carries ``out`` in its environment, and what is given as ``environment``."""

    def __init__(self, out: Path, command: list[str], **environment: str):
        """
        Args:
            command: of Python, e.g. ``["small_run.py", MODEL, OUT]``.
        """
        self.out = out
        self.log = out / "run.log"
        self._began = self.log.stat().st_size if self.log.exists() else 0
        ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", _MARK: str(out)}
        ours["LOG_LEVEL"] = "INFO"  # tells of every phase
        ours["SPT_NOENV"] = "1"  # a process that renames itself would write its name over its environment
        environment = {**os.environ, **ours, **environment}
        environment.pop("ISOEXEC_CONTRACT", None)
        with self.log.open("ab") as log:
            self.driver = subprocess.Popen([sys.executable, *command], cwd=HERE, env=environment, stdout=log, stderr=log)

    def end(self) -> int:
        """Its exit status; what it leaves behind is killed and said."""
        try:
            return self.driver.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise AssertionError(f"not at its end after {_LIMIT} s: {self.text()}") from None

    def text(self) -> str:
        """The last of what it printed, and of what its actors did."""
        logs = [self.log, *sorted((self.out / "logs").glob("*.log"))]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs if log.exists())

    def wait_for(self, what: str, condition):
        """What ``condition()`` gives once it is true."""
        until = time.monotonic() + _LIMIT
        while time.monotonic() < until:
            if found := condition():
                return found
            assert self.driver.poll() is None, f"ended before {what}: {self.text()}"
            time.sleep(0.02)
        self.kill_all()
        raise AssertionError(f"no {what} after {_LIMIT} s: {self.text()}")

    def wait_for_step(self, step: int) -> None:
        """Until ``step`` is done and the next has begun."""
        self.wait_for(f"step {step}", lambda: any(line["step"] >= step for line in read_steps(self.out / "steps.jsonl")))

    def said(self) -> str:
        """What its driver printed."""
        return self.log.read_bytes()[self._began :].decode(errors="replace")

    def wait_for_phase(self, phase: str) -> None:
        """Until a step of this process is in ``phase`` (a timer of SkyRL's), and one is done, be it by the process before it."""

        def within() -> bool:
            _, begun, step = self.said().rpartition("Started: 'step'")
            return bool(begun) and f"Started: '{phase}'" in step and bool(read_steps(self.out / "steps.jsonl"))

        self.wait_for(phase, within)

    def processes(self) -> dict[int, str]:
        """Process id -> command line of what lives of it."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"{_MARK}={self.out}\0".encode() in (entry / "environ").read_bytes() + b"\0"
                if mine and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
        return found

    def process(self, name: str) -> int:
        """Id of the process whose command line holds ``name``."""
        [pid] = [pid for pid, command in self.processes().items() if name in command]
        return pid

    def left(self, seconds: float = 120.0) -> dict[int, str]:
        """What still lives of it after ``seconds``; Ray's two agents look for their node a minute before they give up."""
        until = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        return found

    def kill_all(self) -> None:
        """So that a failing test leaves nothing."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def listens(pid: int) -> list:
    """Addresses on which a process listens for TCP."""
    known, found = _listening(), []
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended
        return found
    for entry in entries:
        try:
            link = os.readlink(entry)
        except OSError:
            continue
        if link.startswith("socket:["):
            found += [known[link[8:-1]]] if link[8:-1] in known else []
    return found


def _listening() -> dict[str, ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Inode -> address of every TCP socket of the machine that listens."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                words = bytes.fromhex(fields[1].partition(":")[0])
                address = ipaddress.ip_address(b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4)))
                found[fields[9]] = getattr(address, "ipv4_mapped", None) or address
    return found


def digests(folder: Path) -> dict[str, str]:
    """Relative path -> hash of every file below ``folder``."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def numbers(out: Path) -> list[dict]:
    """The steps of a run without their times."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in read_steps(out / "steps.jsonl")]
