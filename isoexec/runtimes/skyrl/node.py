"""A Ray node of this machine alone, which starts on a busy machine too."""

from __future__ import annotations

import os
import socket

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import (
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    persist_port,
)

_START_TIMEOUT = 600  # seconds
_HEALTH_TIMEOUT = 60  # seconds in which a node answers, be its machine ever so busy
_AGENT_PORTS = 22_000, 32_000
_STRIDE = 8  # runs that start at one time begin their search apart
#: Name under which Ray's raylet learns the port of an agent -> the parameter that gives it.
_PORTS = {
    RUNTIME_ENV_AGENT_PORT_NAME: "runtime_env_agent_port",
    DASHBOARD_AGENT_LISTEN_PORT_NAME: "dashboard_agent_listen_port",
    METRICS_AGENT_PORT_NAME: "metrics_agent_port",
    METRICS_EXPORT_PORT_NAME: "metrics_export_port",
}


class LocalNode(Node):
    """A node of Ray without what a run has no use for: dashboard, autoscaler, log monitor, idle workers.

    Ray 2.56 gives a node's agents 15 s to import what they need and to say on which ports they listen, and aborts if they do not:
    too little where other work keeps the cores. Here the ports are chosen first, and the raylet finds them written; it reaches an
    agent when that is up. Ray has no setting for any of this, so its own class is extended.

    Args:
        address: of this machine, to which Ray's agents are bound.
        gpus: that Ray's ``GPU`` resource counts; where there are none, processes.
        cpus: that its ``CPU`` resource counts.
        object_store: bytes; ``None`` is Ray's choice.
        head: address of the cluster that it joins; ``None`` starts one.
    """

    def __init__(self, address: str, gpus: int, cpus: int, object_store: int | None, head: str | None = None):
        # What a cluster is told once; of its nodes the first says it.
        system = {
            "agent_register_timeout_ms": 1000 * _START_TIMEOUT,
            "worker_register_timeout_seconds": _START_TIMEOUT,  # after a minute Ray starts another, and at last gives its actor up
            "health_check_timeout_ms": 1000 * _HEALTH_TIMEOUT,  # one that is gone refuses at once, and is noticed as soon as before
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
            "worker_niceness": 0,  # actors do the work of a run; Ray would give way to everything else
        }
        parameters = RayParams(
            node_ip_address=address,
            num_gpus=gpus,
            num_cpus=cpus,
            object_store_memory=object_store,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
            gcs_address=head,
            _system_config=system if head is None else None,
            **dict(zip(_PORTS.values(), _free_ports(len(_PORTS), skip=0 if head is None else _STRIDE // 2), strict=True)),
        )
        super().__init__(parameters, head=head is None, shutdown_at_exit=True, spawn_reaper=True)

    def start_api_server(self, **unused) -> None:
        """None: Ray would start a reduced one even where no dashboard is asked for."""

    def start_raylet(self, *args, **kwargs) -> None:
        for name, parameter in _PORTS.items():
            persist_port(self._session_dir, self._node_id, name, getattr(self._ray_params, parameter))
        super().start_raylet(*args, **kwargs)

    def stop(self) -> None:
        """End the node's processes, and with them every actor."""
        self.kill_all_processes(check_alive=False, allow_graceful=True)  # else the agents live on for a minute


def _free_ports(count: int, skip: int) -> list[int]:
    """Ports that nothing listens on, outside the range from which the kernel gives others theirs while the agents still import.

    Args:
        skip: ports at which another node of this process may be about to listen.
    """
    first, last = _AGENT_PORTS
    found = []
    for offset in range(last - first):
        port = first + (_STRIDE * os.getpid() + skip + offset) % (last - first)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))  # at another address than 127.0.0.1 Ray's servers listen on every interface
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"Ray's agents need {count} free ports between {first} and {last}; end what listens there")
