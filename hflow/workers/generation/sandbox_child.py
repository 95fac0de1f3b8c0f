"""What runs inside the process of a sandboxed tool. Imports neither torch nor ray by itself."""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import cloudpickle

from hflow.workers.error_location import error_line

MIB = 2**20
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_REFUSED = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")
"""A process that it starts could have a network."""

Isolation = Literal["namespace", "audit"]


class _Child:
    """State of this process."""

    tool: Callable[..., Any]
    isolation: Isolation


def confine(shipped: bytes, memory_mb: int) -> None:
    """Load the tool, then give up network and memory, once per process."""
    _Child.tool = cloudpickle.loads(shipped)
    _Child.isolation = cut_network()
    limit_memory(memory_mb)


def cut_network() -> Isolation:
    """Leave this process without network, for good; returns by what means.

    On Linux it gets a network namespace of its own, which holds nothing. Where the kernel or the
    container does not allow that, an audit hook of the interpreter refuses sockets and new processes:
    this stops programs, but not native code that is out to get around it.
    """
    if _has_own_namespace():
        return "namespace"
    sys.addaudithook(refuse_network)
    return "audit"


def _has_own_namespace() -> bool:
    """Whether a namespace could be had, as root or, where users may, in a user namespace."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return any(libc.unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook.

    Raises:
        PermissionError: for a socket other than to this machine's processes, and for new processes.
    """
    if event == "socket.__new__" and arguments[1] in (socket.AF_UNIX, -1):
        return
    if event.startswith("socket.") or event in _REFUSED:
        raise PermissionError(f"a sandboxed function has no network ({event})")


def limit_memory(memory_mb: int) -> None:
    """Bound the address space to what there is now and so much more; Linux only."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        used = int(pages.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + memory_mb * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_tool(arguments: Mapping[str, Any]) -> bytes:
    """Call the tool.

    Returns:
        Pickled: whether it failed, and its result or what it failed with.
    """
    try:
        return pickle.dumps((False, _result(arguments)), pickle.HIGHEST_PROTOCOL)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - as a tool may
        return pickle.dumps((True, error_line(error)), pickle.HIGHEST_PROTOCOL)


def _result(arguments: Mapping[str, Any]) -> Any:
    result = _Child.tool(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
