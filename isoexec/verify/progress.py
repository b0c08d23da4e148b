"""Progress lines with the seconds since the start, from any thread."""

from __future__ import annotations

import sys
import threading
import time


class Progress:
    """Callable that prints one line to ``stream`` (stderr by default)."""

    def __init__(self, stream=None):
        self._stream = stream or sys.stderr
        self._began = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def __call__(self, text: str) -> None:
        with self._lock:
            print(f"[{self.seconds:5.1f} s] {text}", file=self._stream, flush=True)
