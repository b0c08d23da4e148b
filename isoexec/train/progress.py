"""A line on stderr for each step, from the file that the run writes."""

from __future__ import annotations

import json
import sys
import threading
import time
from os.path import commonprefix
from pathlib import Path

from isoexec.train.report import MISMATCH, entry, held_out, number, seconds, share

_INTERVAL = 0.5  # seconds


class Watch:
    """Prints the steps that are added to ``path`` while the context is open, with a bar and the seconds left.

    Args:
        path: ``steps.jsonl``; need not exist yet. What it holds at the beginning is not shown; a new run sets it aside.
        total: steps of the run.
        stream: where to print; stderr by default.
    """

    def __init__(self, path: Path, total: int, *, stream=None):
        self._path, self._total, self._stream = path, total, stream or sys.stderr
        self._seen = self._lines()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="isoexec-progress", daemon=True)
        self._began = time.monotonic()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ending.wait(_INTERVAL):
            self._show()
        self._show()

    def _show(self) -> None:
        lines = self._lines()
        known = len(commonprefix([self._seen, lines]))  # a resumed run takes the last lines back
        self._seen = lines
        for text in lines[known:]:
            self._print(self._line(json.loads(text)))

    def _print(self, text: str) -> None:
        """Above the bars of a step, where they are shown."""
        from tqdm import tqdm  # reads the environment when it is imported

        tqdm.write(text, file=self._stream)
        self._stream.flush()

    def _lines(self) -> list[bytes]:
        """Whole lines of the file; one that is still being written is read next time."""
        try:
            return self._path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:  # a new run has set an older one's aside
            return []

    def _line(self, step: dict) -> str:
        return line(step, self._total, time.monotonic() - self._began)


def line(step: dict, total: int, elapsed: float) -> str:
    """A step in one line.

    Args:
        step: of ``steps.jsonl``.
        total: steps of the run.
        elapsed: seconds since the run's start.
    """
    done = step["step"]
    full = round(12 * min(done / max(total, 1), 1))
    parts = [f"[{elapsed:6.1f} s] {'#' * full}{'.' * (12 - full)} {done:>{len(str(total))}}/{total}"]
    for label, read, form in _SHOWN:
        if isinstance(read(step), (int, float)):
            parts.append(f"{label} {form(read(step))}")
    return "  ".join(parts)


_SHOWN = (
    ("held-out", held_out, share),
    ("pass", entry("pass_rate"), share),
    ("reward", entry("reward"), number),
    ("|d| max", entry(f"{MISMATCH}_max"), number),
    ("bits equal", entry("bit_equal"), share),
    ("loss", entry("loss"), number),
    ("grad", entry("grad_norm"), number),
    ("s", seconds("step"), number),
)
