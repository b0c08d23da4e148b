"""A process that ends with those that it cannot do without."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import psutil
from loguru import logger

_SECONDS = 1.0


def end_with(processes: Sequence[psutil.Process], ending: threading.Event) -> None:
    """End this process, with status 1 and no more ado, once one of ``processes`` has ended; from a thread that does not keep it alive.

    Args:
        processes: children of this process.
        ending: is set before they are ended on purpose.
    """

    def watch():
        while not ending.wait(_SECONDS):
            gone = [process.pid for process in processes if not _runs(process)]
            if gone and not ending.is_set():
                logger.error(f"process {gone[0]}, which this one cannot do without, has ended: so does this one")
                os._exit(1)

    threading.Thread(target=watch, name="isoexec-end-with", daemon=True).start()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
