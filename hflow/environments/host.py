"""The server of environments, in their own interpreter: it loads them once and serves a session per episode.

It is run by its path, needs Python 3.9 or newer and the standard library only, and imports nothing of hflow
but the guard of processes, by its path. The first argument is the file descriptor of the control socket,
which receives the setup as a line of JSON, is answered by a line, and then receives the sockets of sessions.
The `remote.py` of an adapter may import this module as `hflow_host`, for `load_name`, `load_file` and
`CONTAINER_LABEL`.

A session is a socket. Each line is a request `{"method": ..., "arguments": {...}}`, answered by a line with
`result`, or with `error`. What environments print goes to the log, so it cannot disturb the protocol.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import secrets
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

MAX_LINE = 64 << 20
"""Most bytes of a request."""
CONTAINER_LABEL = f"hflow.environment={secrets.token_hex(8)}"
"""The label of the containers of Docker that this server starts. They are removed when it ends."""
_REMOVE_CONTAINERS = (
    'found=$(docker ps --all --quiet --filter "label=$1"); [ -z "$found" ] || docker rm --force $found'
)


def main() -> None:
    """Serve the control socket until it is closed. Does not return."""
    del sys.path[0]  # the directory of this file, whose folders have the names of packages
    sys.modules["hflow_host"] = sys.modules[__name__]
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(_read_line(control))
    guard = load_file(setup["guard"])
    remove = ["sh", "-c", _REMOVE_CONTAINERS, "sh", CONTAINER_LABEL]
    guard.guard_server(at_end=remove if setup["starts_containers"] else ())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        target = load_file(setup["remote"]).load(**setup["load"])
        problem = None
    except BaseException as error:  # noqa: BLE001 - a package may raise anything
        target, problem = None, _failure(error)
    _send(control, problem or {"result": None})
    if problem is None:
        serve = _serve_in_tasks if getattr(target, "one_process", False) else _ForkingServer(guard).serve
        serve(control, target)
    os._exit(0)  # the guard ends what runs


def load_name(place: str) -> Any:
    """Return the value that `FILE.py:NAME` or `MODULE:NAME` names.

    Raises:
        ValueError: if there is none.
    """
    module_name, _, name = place.rpartition(":")
    try:
        if module_name.endswith(".py"):
            module = load_file(module_name)
        else:
            module = importlib.import_module(module_name)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise ValueError(f"{place} cannot be imported: {error}; install it, or correct its name") from None
    if not hasattr(module, name):
        raise ValueError(f"{module_name} has no {name!r}; write MODULE:NAME or FILE.py:NAME")
    return getattr(module, name)


def load_file(path: str) -> Any:
    """Return the module in a file, which is executed once."""
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(path, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        sys.modules[path] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[path]
            raise
    return sys.modules[path]


class _ForkingServer:
    """Serves each session in a process that begins as a copy of this one, and ends with the session."""

    def __init__(self, guard: Any) -> None:
        self._guard = guard
        self._running: dict[int, socket.socket] = {}
        """Process -> its session."""
        self._wakeup, self._writer = os.pipe()
        for end in (self._wakeup, self._writer):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def serve(self, control: socket.socket, target: Any) -> None:
        """Start and end sessions until the control socket is closed."""
        while True:
            for connection in self._wait(control):
                if connection is None:
                    return
                self._start(control, connection, target)
            for pid, code in self._guard.reap().items():
                if pid in self._running:
                    self._finish(self._running.pop(pid), code)
            self._guard.kill_orphans(self._running)

    def _wait(self, control: socket.socket) -> list[socket.socket | None]:
        """Wait for something; kill sessions that were closed. Return the new ones, and None at the end."""
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.register(self._wakeup, select.POLLIN)
        sessions = {connection.fileno(): pid for pid, connection in self._running.items()}
        for file in sessions:
            poll.register(file, 0)  # reports the end of the connection only
        new: list[socket.socket | None] = []
        for file, _ in poll.poll(self._guard.POLL_SECONDS * 1000):
            if file == self._wakeup:
                os.read(file, 65536)
            elif file == control.fileno():
                new.extend(_receive(control))
            else:
                _kill(sessions[file])
        return new

    def _start(self, control: socket.socket, connection: socket.socket, target: Any) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            _send(connection, {"error": f"no process can be made: {error}"})
            connection.close()
            return
        if pid:
            self._running[pid] = connection
            return
        try:
            self._guard.run_in_session()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            for other in self._running.values():
                other.close()
            _serve_session(connection, target)
        finally:
            os._exit(0)

    def _finish(self, connection: socket.socket, code: int) -> None:
        """Say how the process of a session ended, to a client that still waits."""
        _send(connection, {"ended": code})
        connection.close()


def _serve_session(connection: socket.socket, target: Any) -> None:
    """Answer the requests of one session, one after the other."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    with connection.makefile("rb") as requests:
        for line in requests:
            request = json.loads(line)
            try:
                result = getattr(target, request["method"])(**request["arguments"])
                if inspect.isawaitable(result):
                    result = loop.run_until_complete(_result(result))
                if request["method"] == "open":
                    target, result = result, None
                reply = _reply(result)
            except BaseException as error:  # noqa: BLE001 - an environment may raise anything
                reply = _failure(error)
            _send(connection, reply)


def _serve_in_tasks(control: socket.socket, target: Any) -> None:
    """Serve all sessions on the event loop of this process, until the control socket is closed."""

    async def serve() -> None:
        loop, ended, sessions = asyncio.get_running_loop(), asyncio.Event(), set()

        def receive() -> None:
            for connection in _receive(control):
                if connection is None:
                    ended.set()
                    continue
                session = loop.create_task(_serve_task(connection, target))
                sessions.add(session)
                session.add_done_callback(sessions.discard)

        loop.add_reader(control, receive)
        await ended.wait()

    asyncio.run(serve())


async def _serve_task(connection: socket.socket, target: Any) -> None:
    """Answer the requests of one session. The end of its connection cancels what runs."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE)
    session: Any = target
    reading = asyncio.ensure_future(reader.readline())
    try:
        while line := await reading:
            reading = asyncio.ensure_future(reader.readline())
            answer = asyncio.ensure_future(_answer(session, json.loads(line)))
            await asyncio.wait([answer, reading], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()  # the client has gone, as it waits for each answer
                return
            session, reply = answer.result()
            writer.write(_line(reply))
            await writer.drain()
    except (OSError, asyncio.CancelledError):
        pass
    finally:
        reading.cancel()
        writer.close()
        if session is not target and hasattr(session, "close"):
            with suppress(Exception):
                await session.close()


async def _answer(target: Any, request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the object that answers the next request, and the reply to this one."""
    try:
        method = getattr(target, request["method"])
        if inspect.iscoroutinefunction(method):
            result = await method(**request["arguments"])
        else:
            result = await asyncio.to_thread(method, **request["arguments"])
        return (result, _reply(None)) if request["method"] == "open" else (target, _reply(result))
    except Exception as error:  # noqa: BLE001 - an environment may raise anything
        return target, _failure(error)


async def _result(awaitable: Any) -> Any:
    return await awaitable


def _reply(result: Any) -> dict[str, Any]:
    json.dumps(result)  # an error of the environment if it cannot be sent
    return {"result": result}


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the reply of a failed request. The log has the traceback."""
    traceback.print_exception(type(error), error, error.__traceback__)
    text = " ".join(str(error).split())
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    return {"error": f"{type(error).__name__}: {text}" if text else type(error).__name__, "missing": missing}


def _receive(control: socket.socket) -> list[socket.socket | None]:
    """Receive the sockets of new sessions; None: the control socket was closed."""
    message, files, _, _ = socket.recv_fds(control, 1, 1)
    return [socket.socket(fileno=file) for file in files] if message else [None]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _send(connection: socket.socket, reply: dict[str, Any]) -> None:
    with suppress(OSError):  # the client has gone
        connection.sendall(_line(reply))


def _line(reply: dict[str, Any]) -> bytes:
    return json.dumps(reply).encode() + b"\n"


def _read_line(connection: socket.socket) -> bytes:
    """Read a line and nothing behind it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            os._exit(0)
        line += part
    return bytes(line)


if __name__ == "__main__":
    main()
