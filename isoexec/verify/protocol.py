"""Worker processes that answer JSON lines: one for each side and arm, so that no state is shared.

The parent writes one request per line on the worker's stdin, ``{"do": name, "with": arguments}``; the worker answers with one line on
its original stdout, ``{"ok": result}`` or ``{"error": text, "kind": ...}``. A first line ``{"ok": ...}`` says that the worker has started.
Whatever frameworks print goes to the worker's log file. fp32 values travel as their bit patterns (:func:`to_bits`): no printer rounds them.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from isoexec.contract import ContractError


class WorkerError(RuntimeError):
    """A worker died, did not answer in time, or answered something else; the message names it and its log."""


class OperationFailed(WorkerError):
    """An operation raised an exception; the worker serves on."""


class WorkerRefused(OperationFailed):
    """A worker refused its input with a :class:`~isoexec.contract.ContractError`."""


def to_bits(values: list[float]) -> list[int]:
    """Bit patterns of values that are fp32 exactly, as unsigned integers.

    Raises:
        ValueError: a value is not an fp32 number; rounding it here would hide a difference.
    """
    bits = []
    for value in values:
        packed = struct.pack("<f", value)
        if struct.unpack("<f", packed)[0] != value and value == value:
            raise ValueError(f"logprob {value!r} is not an fp32 value")
        bits.append(struct.unpack("<I", packed)[0])
    return bits


def from_bits(bits: list[int]) -> list[float]:
    """The fp32 values of bit patterns, as exact Python floats."""
    return [struct.unpack("<f", struct.pack("<I", b))[0] for b in bits]


# --- the worker's side ------------------------------------------------------------------------------------------------------


def serve(start: Callable[[], dict[str, Callable]]) -> int:
    """Answer requests until stdin ends. ``start`` imports what the worker needs and returns its operations by name."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # libraries print to stdout; only the protocol may write there

    def reply(answer: Callable[[], object]) -> bool:
        began = time.monotonic(), time.process_time()
        try:
            line = {"ok": answer()}
        except Exception as error:  # the parent decides what a failure means
            traceback.print_exc()
            kind = "refused" if isinstance(error, ContractError) else "crashed"
            line = {"error": f"{type(error).__name__}: {error}", "kind": kind}
        spent = time.monotonic() - began[0], time.process_time() - began[1]
        print(json.dumps(line | {"seconds": spent}), file=replies, flush=True)
        return "ok" in line

    operations: dict[str, Callable] = {}
    if not reply(lambda: operations.update(start())):
        return 1
    for line in requests:
        request = json.loads(line)
        reply(lambda: operations[request["do"]](**request["with"]))
    return 0


# --- the parent's side ------------------------------------------------------------------------------------------------------


class Worker:
    """A running worker. Calls block; use one thread at a time for each worker."""

    def __init__(self, name: str, module: str, environment: dict[str, str | None], log: Path):
        """Start ``python -m module`` with ``environment`` laid over this process's (None removes a variable)."""
        self.name, self.log = name, log
        self.seconds: dict[str, list[float]] = {}  # operation -> wall-clock and CPU seconds
        self._has_started = False
        merged = {**os.environ, **{k: v for k, v in environment.items() if v is not None}}
        for key in (k for k, v in environment.items() if v is None):
            merged.pop(key, None)
        with open(log, "wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=merged,
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent, which ends the whole group
                text=True,
                encoding="utf-8",
                errors="replace",
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"read {name}", daemon=True).start()

    def started(self, timeout: float) -> None:
        """Wait until the worker has imported what it needs. :meth:`call` does it too."""
        if not self._has_started:
            self._answer("start", timeout)
            self._has_started = True

    def call(self, operation: str, timeout: float, **arguments):
        """Result of ``operation``.

        Raises:
            WorkerRefused: the operation raised a ContractError.
            OperationFailed: it raised anything else.
            WorkerError: the worker died, or there was no answer within ``timeout`` seconds.
        """
        self.started(timeout)
        try:
            self._process.stdin.write(json.dumps({"do": operation, "with": arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._error(f"died before {operation!r} (exit status {self._status()})") from None
        return self._answer(operation, timeout)

    def stop(self) -> None:
        """End the worker and every process it started. Safe to repeat."""
        for sign, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
            try:
                os.killpg(self._process.pid, sign)
            except (ProcessLookupError, PermissionError):
                pass
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
        try:
            self._process.stdin.close()
        except OSError:
            pass

    def _answer(self, operation: str, timeout: float):
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise self._error(f"no answer to {operation!r} within {timeout:g} s") from None
        if line is None:
            raise self._error(f"died in {operation!r} (exit status {self._status()})")
        try:
            answer = json.loads(line)
            seconds = answer["seconds"]
            outcome = "ok" if "ok" in answer else "error"
            content = answer[outcome]
        except (ValueError, TypeError, KeyError):
            raise self._error(f"answered {operation!r} with {line[:80]!r}, which is not a line of the protocol") from None
        before = self.seconds.get(operation, (0.0, 0.0))
        self.seconds[operation] = [round(old + new, 2) for old, new in zip(before, seconds, strict=True)]
        if outcome == "error":
            kind = WorkerRefused if answer.get("kind") == "refused" else OperationFailed
            raise self._error(f"{operation!r} failed: {content}", kind)
        return content

    def _error(self, text: str, kind: type[WorkerError] = WorkerError) -> WorkerError:
        return kind(f"{self.name}: {text}; log: {self.log}")

    def _status(self):
        try:
            return self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "none yet"

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Ranks:
    """Workers that are the ranks of one side, in their order: each makes every call, and all have to give the same answer."""

    def __init__(self, workers: Sequence[Worker]):
        self._workers = list(workers)
        self.name, self.log = workers[0].name, workers[0].log
        self._calls = ThreadPoolExecutor(len(workers), thread_name_prefix=self.name)

    def call(self, operation: str, timeout: float, **arguments):
        """As :meth:`Worker.call`.

        Raises:
            WorkerError: as there, or two ranks answer differently.
        """
        if operation == "open":  # they meet at one port: a rank that is early would find the store of the engine before, and both wait for ever
            self.call("close", timeout)
        pending = [self._calls.submit(worker.call, operation, timeout, **arguments) for worker in self._workers]
        ended, _ = wait(pending, return_when=FIRST_EXCEPTION)  # a rank that fails leaves the others waiting for it
        answers = [call.result() for call in sorted(ended, key=pending.index)]
        for worker, answer in zip(self._workers, answers):
            if answer != answers[0]:
                raise WorkerError(f"{worker.name}: answers {operation!r} otherwise than {self.name}; logs: {worker.log}, {self.log}")
        return answers[0]


class WorkerGroup:
    """Workers that live and die together: the first failure ends all of them, and leaving the block always does.

    Within the block SIGTERM interrupts the main thread as Ctrl-C does, so that no worker outlives its group.
    """

    def __init__(self, logs: Path):
        self._logs = logs
        self._lock = threading.Lock()
        self._stopped = False
        self.workers: list[Worker] = []
        self._ports: list[int] = []  # of ranks
        self.error: BaseException | None = None  # the first failure; those that follow are its consequences
        self._restore: Callable[[], object] = lambda: None

    def __enter__(self) -> WorkerGroup:
        if threading.current_thread() is threading.main_thread():
            self._restore = functools.partial(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, signal.default_int_handler))
        return self

    def __exit__(self, *exc) -> None:
        try:
            self.stop()
        finally:
            self._restore()

    def start(self, name: str, module: str, environment: dict[str, str | None]) -> Worker:
        """Start a worker whose log is ``<logs>/<name>.log``."""
        with self._lock:
            if self._stopped:
                raise WorkerError(f"{name}: not started, the group has ended")
            worker = Worker(name, module, environment, self._logs / f"{name}.log")
            self.workers.append(worker)
            return worker

    def start_ranks(self, count: int, name: str, module: str, environment: dict[str, str | None]) -> Worker | Ranks:
        """Start ``count`` ranks of one side, which find each other by torch's variables; one is a worker like any other."""
        if count == 1:
            return self.start(name, module, environment)
        port = _free_port()
        self._ports.append(port)
        common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [environment | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        return Ranks([self.start(f"{name}-{rank}", module, each) for rank, each in enumerate(ranks)])

    def fail(self, error: BaseException) -> None:
        """Record ``error`` if it is the first and end every worker."""
        with self._lock:
            self.error = self.error or error
        self.stop()

    def stop(self) -> None:
        """End every worker; nothing starts in this group afterwards."""
        with self._lock:
            self._stopped = True
            threads = [threading.Thread(target=w.stop) for w in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for port in self._ports:  # vLLM's ranks on a CPU leave the memory that they share when they are ended
            for path in Path("/dev/shm").glob(f"{port}-*cpushm_*"):
                path.unlink(missing_ok=True)


def _free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]
