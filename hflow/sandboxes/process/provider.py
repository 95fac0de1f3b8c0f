"""`ProcessSandboxes`: runs calls of tools in confined processes, which are killed when their time is up.

These are not the processes of the pool of bodies. The pool may run a body twice, to find which job of a chunk
is slow, while a tool is called once and never again. And a confined process cannot run a body that needs
a network.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hflow.base.errors import EpisodeError, RunError, timeout_message
from hflow.processes.guard import read_stat
from hflow.processes.pickling import pickle_with_bodies
from hflow.sandboxes.calls import (
    LONGEST_REPLY,
    LONGEST_STRETCH,
    START_SECONDS,
    CallPlaces,
    name_of,
    parse_reply,
    result_of,
)
from hflow.sandboxes.confinement import missing_filter, missing_protection
from hflow.sandboxes.process.child import ENDED, LENGTH, NOT_MADE, PID, STARTED, ServerSetup
from hflow.types.sandbox import Sandbox, Tool, ToolFailed

_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from hflow.sandboxes.process.child import main; main()"
)
_ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
"""All environment variables of a server. Those of this process may hold secrets."""


class _LostCallError(Exception):
    """Nothing is known of a call, as what runs it has failed. The message says how."""


class ProcessSandboxes:
    """A server for each tool with its limits, started when the tool is first called.

    A tool has at most `num_processes` calls at the same time. The time of a call begins when it runs.
    """

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._servers: dict[tuple[Tool, Sandbox], _ToolServer] = {}
        self._places = CallPlaces(num_processes)

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool, as `SandboxProvider.run`. Cancelling the awaiting task kills the call's processes.

        A call that was lost is repeated in a server of its own: its server ended, as another call may have
        ended it; its process was not started, or was killed from outside; or the disk is full.
        """
        request = json.dumps(arguments).encode()
        async with self._places.of(tool, limits):
            try:
                kind, value = await self._call(self._connect(tool, limits), limits, request)
            except _LostCallError:
                kind, value = await self._call_alone(tool, limits, request)
        return result_of(tool, kind, value)

    @staticmethod
    def find_problem(limits: Sandbox) -> str | None:
        """Return the reason why this machine cannot hold limits, and what to change; None if it can."""
        if limits.image:
            return f"provider='process' has no images. Remove image={limits.image!r}"
        if (missing := missing_filter()) is not None:
            return f"{missing}. Use such a machine, or remove @sandbox from tools that you trust"
        if (missing := missing_protection()) is not None and not limits.without_landlock:
            return (
                f"{missing}. Use another machine or, if the tool may read and write your files, "
                "without_landlock=True"
            )
        return None

    def close(self) -> None:
        """Kill what runs and end the servers."""
        for server in self._servers.values():
            server.close()
        self._servers.clear()

    async def _call_alone(self, tool: Tool, limits: Sandbox, request: bytes) -> tuple[str, Any]:
        """Send a request to a process of a new server, which serves no other call."""
        server = _ToolServer(tool, limits, num_calls=1)
        try:
            return await self._call(server.connect(), limits, request)
        except _LostCallError as error:
            raise EpisodeError(
                f"the sandbox of {name_of(tool)} failed twice, so the call has no result: {error}"
            ) from None
        finally:
            server.close()

    async def _call(self, connection: socket.socket, limits: Sandbox, request: bytes) -> tuple[str, Any]:
        """Send a request to a new process and return its reply.

        Raises:
            _LostCallError: when the call has no result, and its process is not the reason.
        """
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            writer.write(request)
            writer.write_eof()
            reply = await _read_in_time(reader, await _read_start(reader), limits.timeout)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise _LostCallError(f"the connection to its process was lost: {error}") from None
        finally:
            writer.close()  # the server kills the processes of the call, unless it has ended
        if not reply.endswith(ENDED):
            raise _LostCallError("its process was killed, or the server of its processes ended")
        kind, value = parse_reply(reply.removesuffix(ENDED))
        if kind == "lost":
            raise _LostCallError(str(value))
        return kind, value

    def _connect(self, tool: Tool, limits: Sandbox) -> socket.socket:
        server = self._servers.get((tool, limits))
        if server is None or server.has_ended:
            if server is not None:
                server.close()
            server = self._servers[tool, limits] = _ToolServer(tool, limits, self._num_processes)
        return server.connect()


class _ToolServer:
    """The server of one tool."""

    def __init__(self, tool: Tool, limits: Sandbox, num_calls: int) -> None:
        pickled = pickle_with_bodies(tool, [tool])
        setup = pickle.dumps(
            ServerSetup(
                pickled, limits.memory_mb, limits.readable, limits.processes, num_calls, tempfile.gettempdir()
            )
        )
        self._control, theirs = socket.socketpair()
        path = json.dumps([os.path.abspath(part) for part in sys.path])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _MAIN, str(theirs.fileno()), path],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._control.sendall(LENGTH.pack(len(setup)) + setup)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def connect(self) -> socket.socket:
        """Return a connection to a new process of the server; closed if the server has just ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            except OSError:
                self._process.kill()
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        self._control.close()
        self._process.kill()  # its guard ends the rest
        self._process.wait()


async def _read_start(reader: asyncio.StreamReader) -> int:
    """Wait until the process of a call is confined, and return its id."""
    try:
        async with asyncio.timeout(START_SECONDS):
            first = await reader.read(1)
    except TimeoutError:
        raise _LostCallError(f"its process did not start in {START_SECONDS:g} s") from None
    if first in (b"", ENDED):
        raise _LostCallError("its process ended before it was confined")
    if first == NOT_MADE:
        raise _LostCallError((await reader.read()).decode())
    if first != STARTED:
        raise RunError((first + await reader.read()).decode())
    pid: int = PID.unpack(await reader.readexactly(PID.size))[0]
    return pid


async def _read_in_time(reader: asyncio.StreamReader, pid: int, timeout: float) -> bytes:
    """Read what a process writes until its connection is closed.

    Its time is that in which it ran or chose to wait. Waiting for a processor does not count, and neither
    does what remains to be read once it has ended: a busy machine is no failure of a program.

    Raises:
        ToolFailed: when it takes longer than its timeout, or writes too much.
        _LostCallError: when the machine is too busy to say.
    """
    start = time.monotonic()
    reading = asyncio.ensure_future(_read_all(reader))
    remaining = timeout
    try:
        while not (await asyncio.wait([reading], timeout=remaining))[0]:
            elapsed, waited = time.monotonic() - start, _seconds_waited(pid)
            if waited is not None and elapsed - waited >= timeout:
                raise ToolFailed(timeout_message(timeout))
            if elapsed >= LONGEST_STRETCH * timeout + (START_SECONDS if waited is None else 0):
                raise _LostCallError(f"the machine is too busy: it had no result after {elapsed:.1f} s")
            remaining = max(0.01, timeout - elapsed + (waited or 0))
        return reading.result()
    finally:
        reading.cancel()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    reply = bytearray()
    while part := await reader.read(2**16):
        reply += part
        if len(reply) > LONGEST_REPLY:
            raise ToolFailed(f"returned more than {LONGEST_REPLY >> 20} MiB")
    return bytes(reply)


def _seconds_waited(pid: int) -> float | None:
    """Return for how long a process has waited for a processor; None if it has ended."""
    stat = read_stat(pid)
    if not stat or stat[0] in "ZX":
        return None
    with suppress(OSError):  # the kernel may not count it
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0
