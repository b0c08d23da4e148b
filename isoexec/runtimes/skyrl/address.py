"""Where the Ray cluster is that a run joins. Asked before anything is written or started: Ray itself tries for minutes."""

from __future__ import annotations

import os
import socket

from isoexec.runtimes.skyrl.config import ConfigError

_PATIENCE = 5.0  # seconds


def answering(address: str) -> str:
    """HOST:PORT of ``isoexec.ray_address``, at which something answers.

    Args:
        address: HOST:PORT, or ``auto``: that of ``RAY_ADDRESS``, or of the cluster that ``ray start`` last started or joined on this
            machine. Ray's own ``auto`` would also take the private cluster of another run.

    Raises:
        ConfigError: another form, no cluster to be found, or one that does not answer.
    """
    found, origin = address, ""
    if address == "auto":
        found, origin = os.environ.get("RAY_ADDRESS"), " (auto: RAY_ADDRESS)"
        if not found:
            found, origin = _recorded(), " (auto: what `ray start` recorded on this machine)"
    if not found:
        raise ConfigError(
            "isoexec.ray_address: auto: expected RAY_ADDRESS, or a cluster that `ray start` started or joined on this machine, found "
            "neither; start one, or name HOST:PORT of its head"
        )
    host, _, port = found.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"isoexec.ray_address: expected HOST:PORT of a cluster's head, or auto, found {found!r}{origin}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"isoexec.ray_address: nothing answers at {found!r}{origin}: {error}; start the cluster there, or name HOST:PORT of its head"
        ) from error
    return found


def _recorded() -> str | None:
    from ray._private.utils import read_ray_address

    return read_ray_address()
