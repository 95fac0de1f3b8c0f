"""Rendezvous of process groups that listen on one address, and not on all of the machine's."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket

from torch._C._distributed_c10d import TCPStore

from hflow.base.errors import RunError, WorkerFailureError

_DEFAULT_TIMEOUT = datetime.timedelta(minutes=5)
CONNECT_SECONDS = 15.0
"""A machine that does not answer in this time is taken to be unreachable. torch would try for minutes."""


def open_store(host: str, timeout: datetime.timedelta = _DEFAULT_TIMEOUT) -> TCPStore:
    """Open a store on a free port of one address. A `TCPStore` that opens its own port listens on all.

    The port is taken at once. A port that is only looked up may be in use by the time it is needed. `host` is
    this machine's address for the other processes; a client may wait `timeout` for a key.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def connect_store(address: str, timeout: datetime.timedelta) -> TCPStore:
    """Join the store at `host:port` that another process has opened, to wait `timeout` for a key at most.

    Raises:
        WorkerFailureError: if no process listens there, as that which has opened it has ended.
        RunError: if this machine cannot reach it.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        kind = WorkerFailureError if isinstance(error, ConnectionRefusedError) else RunError
        raise kind(
            f"{socket.gethostname()} cannot reach {host} at port {port}: {error.strerror or error}. Workers "
            "connect to each other at any free port: open them between the machines, and see that they know "
            "each other by addresses that they can reach (`ray status`)"
        ) from error
    return TCPStore(host, int(port), is_master=False, timeout=timeout)


def listen_where(host: str) -> None:
    """Let gloo and NCCL listen on the loopback interface if this machine's address is a loopback address.

    Otherwise they choose an interface by the machine's name, which other machines may reach. Variables that
    the user has set are kept.
    """
    if _is_loopback(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
