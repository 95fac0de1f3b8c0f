"""What runs inside the process of a sandboxed tool: gives up network and memory, and calls the tool.

This module must import neither torch nor ray, so that the process starts quickly and stays small.
"""

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
from typing import Any

import cloudpickle

from hflow.workers.error_location import error_line

MIB = 2**20
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PROCESS_EVENTS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")
"""Audit events of new processes, which could use a network."""


class _SandboxState:
    """State of this process."""

    tool: Callable[..., Any]


def confine(pickled_tool: bytes, memory_mb: int) -> None:
    """Load the tool, then give up network and memory; called once in every process."""
    _SandboxState.tool = cloudpickle.loads(pickled_tool)
    cut_network()
    limit_memory(memory_mb)


def cut_network() -> None:
    """Leave this process without network, for good.

    On Linux the process gets a network namespace of its own, which holds nothing. Where the kernel or the
    container does not allow this, an audit hook of the interpreter refuses sockets and new processes. The
    hook stops Python code, but not native code that tries to get around it.
    """
    if not _enter_empty_namespace():
        sys.addaudithook(refuse_network)


def _enter_empty_namespace() -> bool:
    """Move to a new network namespace: as root or, where users may, in a user namespace."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return any(libc.unshare(flags) == 0 for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET))


def refuse_network(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse audit events of the network and of new processes.

    Raises:
        PermissionError: for a socket that is not local to this machine, and for a new process.
    """
    if event == "socket.__new__" and arguments[1] in (socket.AF_UNIX, -1):
        return
    if event.startswith("socket.") or event in _PROCESS_EVENTS:
        raise PermissionError(f"a sandboxed function has no network ({event})")


def limit_memory(memory_mb: int) -> None:
    """Limit the address space to its present size plus `memory_mb` MiB. Linux only."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit = used + memory_mb * MIB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def run_tool(arguments: Mapping[str, Any]) -> bytes:
    """Call the tool.

    Returns:
        Pickled: whether it failed, and its result or the error in one line.
    """
    try:
        return pickle.dumps((False, _call_tool(arguments)), pickle.HIGHEST_PROTOCOL)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - a tool may raise anything
        return pickle.dumps((True, error_line(error)), pickle.HIGHEST_PROTOCOL)


def _call_tool(arguments: Mapping[str, Any]) -> Any:
    result = _SandboxState.tool(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
