"""A worker of the protocol that misbehaves on request."""

import os
import subprocess
import sys
import time

from isoexec.contract import ContractError
from isoexec.verify.protocol import serve


def refuse():
    raise ContractError("setting x: expected 1, found 2")


def refuse_on(rank: str) -> None:
    refuse() if os.environ["RANK"] == rank else time.sleep(600)


def spawn_child() -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def start():
    if os.environ.get("ODD") == "dies":
        os._exit(7)
    if os.environ.get("ODD") == "fails":
        raise ImportError("no such framework")
    return {
        "echo": lambda value: value,
        "print": lambda: print("noise on stdout"),
        "environment": lambda name: os.environ.get(name),
        "raw": lambda text: os.write(_protocol_descriptor(), text.encode()),
        "die": lambda: os._exit(9),
        "sleep": lambda: time.sleep(600),
        "divide": lambda: 1 / 0,
        "refuse": refuse,
        "refuse_on": refuse_on,
        "child": spawn_child,
    }


def _protocol_descriptor() -> int:
    """The copy of the original stdout that serve() writes to: the only pipe among the high descriptors that is writable."""
    import fcntl
    import stat

    for fd in range(3, 64):
        try:
            if stat.S_ISFIFO(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                return fd
        except OSError:
            pass
    raise RuntimeError("no writable pipe")


if __name__ == "__main__":
    raise SystemExit(serve(start))
