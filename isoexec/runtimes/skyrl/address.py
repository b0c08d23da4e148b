"""Where the Ray cluster is that a run joins. Asked before anything is written or started: Ray itself tries for minutes."""

from __future__ import annotations

import os
import socket

from isoexec.runtimes.skyrl.config import ConfigError

_PATIENCE = 5.0  # seconds


def answering(address: str) -> str:
    """HOST:PORT of ``isoexec.ray_address``, at which the head of a Ray cluster answers.

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
    if (said := _refusal(found)) is not None:
        raise ConfigError(
            f"isoexec.ray_address: what listens at {found!r}{origin} does not answer as the head of a Ray cluster: {said}; name HOST:PORT "
            "that `ray start --head` printed"
        )
    return found


def _refusal(address: str) -> str | None:
    """What a question that every head answers came to, in one line; None where it was answered, or cannot be asked.

    Ray's own client asks it too, but for most of a minute, and then ends with what no user can read.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")(b"", timeout=_PATIENCE)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                return None  # a head, to be told a token, as Ray's own client will
            return f"{error.code().name}: {' '.join(str(error.details()).split())[:120]}"
    return None


def _recorded() -> str | None:
    from ray._private.utils import read_ray_address

    return read_ray_address()
