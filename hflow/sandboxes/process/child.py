"""The server of a sandboxed tool: it loads the tool once, and forks a confined process for every call.

A call cannot see another one or change what later calls find, as its process begins as a copy of the server
and ends with the call. The server trusts no call: a call's process writes its reply to the socket of the
call, which the worker reads as JSON, and nothing that it writes is unpickled.

This module imports next to nothing of hflow, so that the process starts quickly and stays small.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import pickle
import secrets
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from hflow.processes.guard import POLL_SECONDS, guard_server, kill_orphans, reap, run_in_session
from hflow.sandboxes.confinement import confine, missing_protection
from hflow.sandboxes.inside import format_error, run_call

STARTED = b"\0"
"""The first byte of an answer: the call's process is confined, and its time begins. Its id follows (`PID`).
Any other answer is a text that says why it is not confined."""
NOT_MADE = b"\2"
"""The first byte of an answer when no process could be made for the call. The reason follows."""
ENDED = b"\1"
"""The last byte of an answer, which the server adds when the call's process has ended by itself. Without it,
the server has ended, or the kernel has killed the process, so nothing is known of the call."""
PID = struct.Struct("=i")
_OWN = str(Path(__file__).parents[2])
"""The directory of hflow, which a call may read."""
LENGTH = struct.Struct("=Q")
"""The length of the first message to a server, a pickled `ServerSetup`. Each further byte brings the socket
of a call."""


@dataclass(frozen=True)
class ServerSetup:
    """What a server needs."""

    pickled_tool: bytes
    memory_mb: int
    readable: tuple[str, ...]
    processes: bool
    num_calls: int
    """Most calls at the same time."""
    temporary: str
    """Where the directories of calls are made."""


@dataclass
class _Call:
    """A call that was received. Its process is started when there is room."""

    connection: socket.socket
    scratch: Path | None = None


def main() -> None:
    """Serve the socket whose file descriptor is the first argument, until it is closed. Does not return."""
    guard_server()
    control = socket.socket(fileno=int(sys.argv[1]))
    (length,) = LENGTH.unpack(_read_exactly(control, LENGTH.size))
    setup: ServerSetup = pickle.loads(_read_exactly(control, length))
    _Server(control, setup).serve()
    os._exit(0)  # the guard ends what runs


class _Server:
    def __init__(self, control: socket.socket, setup: ServerSetup) -> None:
        self._control = control
        self._setup = setup
        self._tool, self._problem = _load(setup.pickled_tool)
        self._waiting: deque[_Call] = deque()
        self._running: dict[int, _Call] = {}
        """By process id."""
        self._wakeup, writer = os.pipe()
        self._writer = writer
        for end in (self._wakeup, writer):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Start and end calls until the worker closes the control socket."""
        while True:
            hung_up = self._wait()
            if self._control.fileno() in hung_up:
                return
            for pid, call in self._running.items():
                if call.connection.fileno() in hung_up:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self._waiting = deque(call for call in self._waiting if call.connection.fileno() not in hung_up)
            for pid, exit_code in reap().items():
                if pid in self._running:
                    self._finish(self._running.pop(pid), b"" if exit_code == -signal.SIGKILL else ENDED)
            kill_orphans(self._running)
            while self._waiting and len(self._running) < self._setup.num_calls:
                self._start(self._waiting.popleft())

    def _wait(self) -> set[int]:
        """Wait until something happens; receive calls, and return the sockets that the worker has closed."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        for call in (*self._running.values(), *self._waiting):
            poll.register(call.connection, 0)  # reports the end of the connection only
        hung_up = set()
        for file, _ in poll.poll(POLL_SECONDS * 1000):
            if file == self._wakeup:
                with suppress(BlockingIOError):
                    os.read(self._wakeup, 65536)
            elif file == self._control.fileno():
                message, files, _, _ = socket.recv_fds(self._control, 1, 1)
                if not message:
                    hung_up.add(file)
                self._waiting.extend(_Call(socket.socket(fileno=one)) for one in files)
            else:
                hung_up.add(file)
        return hung_up

    def _start(self, call: _Call) -> None:
        try:
            call.scratch = Path(tempfile.mkdtemp(prefix="hflow-sandbox-", dir=self._setup.temporary))
            pid = os.fork()
        except OSError as error:
            reason = f"the process of a call cannot be made: {format_error(error)}"
            self._finish(call, NOT_MADE + reason.encode())
            return
        if pid:
            self._running[pid] = call
            return
        try:
            self._become(call.connection.detach(), str(call.scratch))
        finally:
            os._exit(0)

    def _become(self, connection: int, scratch: str) -> None:
        """Run a call in this process, which was forked for it."""
        run_in_session()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(connection, 3)
        if self._problem is not None:
            os.write(3, self._problem.encode())
            return
        os.closerange(4, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        os.chdir(scratch)
        os.environ |= {"HOME": scratch, "TMPDIR": scratch}
        tempfile.tempdir = None
        setup = self._setup
        has_landlock = missing_protection() is None
        try:
            readable = (*setup.readable, _OWN)
            confine(setup.memory_mb, scratch, readable, setup.processes, landlock=has_landlock)
        except OSError as error:
            os.write(3, f"the sandbox of a tool cannot be closed: {format_error(error)}".encode())
            return
        os.write(3, STARTED + PID.pack(os.getpid()))
        with os.fdopen(3, "rb", closefd=False) as request:
            arguments = json.load(request)
        assert self._tool is not None, "a tool that cannot be loaded is not called"
        reply = run_call(self._tool, arguments)
        with os.fdopen(3, "wb") as answer:
            answer.write(reply)

    def _finish(self, call: _Call, last: bytes) -> None:
        """End an answer with its last bytes, and remove the call's directory."""
        with suppress(OSError):  # the worker does not wait for it any more
            call.connection.sendall(last)
        call.connection.close()
        if call.scratch is not None:
            kill_orphans(self._running)
            with suppress(OSError):
                _remove_tree(call.scratch)


def _remove_tree(root: Path) -> None:
    """Remove a directory whatever a call has made in it: any depth, any length of paths, any permissions.

    Directories inside of others are moved to the root first, so that no path becomes long.

    Raises:
        OSError: if something cannot be removed.
    """
    names = itertools.count()
    prefix = secrets.token_hex(8)
    while directories := [path for path in root.iterdir() if path.is_dir() and not path.is_symlink()]:
        for directory in directories:
            directory.chmod(0o700)
            for path in directory.iterdir():
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)  # without it, only root can move it
                    path.rename(root / f"{prefix}{next(names)}")
                else:
                    path.unlink()
            directory.rmdir()
    shutil.rmtree(root)


def _load(pickled_tool: bytes) -> tuple[Callable[..., Any] | None, str | None]:
    """Return the tool, or why its module cannot be imported."""
    try:
        tool = cloudpickle.loads(pickled_tool)
        if inspect.iscoroutinefunction(tool):
            import asyncio  # noqa: F401 - once, not in each call
        return tool, None
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        return None, f"the tool's module cannot be loaded in its sandbox: {format_error(error)}"


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            os._exit(0)  # the worker has gone
        data += part
    return bytes(data)
