"""`Host`: a server of environments in another interpreter; `RemoteEnvironment`: an episode's connection."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hflow.base.errors import ConfigError, EpisodeError, shorten
from hflow.base.secrets import mask_secrets
from hflow.environments.interface import HostSettings, adapter_named
from hflow.environments.interpreters import find_interpreter
from hflow.processes import guard
from hflow.types.engine import Replay

MAX_REPLY = 64 << 20
"""Most bytes of a reply."""
_HOST = Path(__file__).with_name("host.py")
_OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this interpreter, which another one must not see."""
_MAX_REASON = 400
_END_SECONDS = 60.0
"""Longest wait for the exit code of a server that has closed its connection."""
_LAST_LINES = 3
"""Lines of a server's log in the reason for which it has not started."""


class Host:
    """A server, started at the first connection and again if it has ended. It ends with this process."""

    def __init__(self, name: str, settings: HostSettings) -> None:
        self._name = name
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket
        self._log: IO[bytes]

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it has loaded the environment.

        Raises:
            ConfigError: if there is no interpreter, or the environment cannot be loaded there.
        """
        with self._lock:
            if self._process is not None and self._has_ended():
                self._end()
            if self._process is None:
                self._start()

    def connect(self) -> socket.socket:
        """Return a connection for a session.

        Raises:
            ConfigError: if `start` raises it.
        """
        self.start()
        ours, theirs = socket.socketpair()
        with theirs, self._lock, suppress(OSError):  # a server that has just ended closes the connection
            socket.send_fds(self._control, [b"s"], [theirs.fileno()])
        return ours

    def request(self, method: str, **arguments: Any) -> Any:
        """Call a method of what was loaded, and wait for its result.

        Raises:
            ConfigError: if `start` raises it.
            EpisodeError: if it fails.
        """
        with self.connect() as connection, connection.makefile("rwb") as stream:
            stream.write(_request(method, arguments))
            stream.flush()
            return self.read_reply(method, stream.readline())

    def read_reply(self, method: str, line: bytes) -> Any:
        """Return the result in the reply to a request.

        Raises:
            EpisodeError: if the environment raised, or its process has ended.
        """
        reply: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"ended": None}
        if "result" in reply:
            return reply["result"]
        if "error" in reply:
            raise EpisodeError(f"{method} of the {self._name} environment failed: {_shown(reply['error'])}")
        how = _format_end(reply["ended"])
        raise EpisodeError(f"the process of the {self._name} environment {how} during {method}")

    def close(self) -> None:
        """End the server and all that it started. Safe to call twice."""
        with self._lock:
            self._end()

    def _has_ended(self) -> bool:
        """Return whether the server has closed the control socket. Its guard ends later."""
        poll = select.poll()
        poll.register(self._control, 0)
        return bool(poll.poll(0))

    def _start(self) -> None:
        settings = self._settings
        try:
            python = find_interpreter(settings.python, settings.requirements)
        except ConfigError as error:
            raise ConfigError(f"the {self._name} environment cannot start: {error}") from None
        own = dict(os.environ)
        if python != sys.executable:
            own = {name: value for name, value in own.items() if name not in _OWN_VARIABLES}
        self._control, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(prefix="hflow-environment-")  # noqa: SIM115 - until `_end`
        with theirs:
            self._process = subprocess.Popen(
                [python, str(_HOST), str(theirs.fileno())],
                env={**own, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        setup = {
            "guard": guard.__file__,
            "remote": str(settings.remote),
            "load": json.loads(settings.load),
            "starts_containers": settings.starts_containers,
        }
        self._control.settimeout(settings.start_timeout)
        problem = reply = None
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it has ended
                self._control.sendall(json.dumps(setup).encode() + b"\n")
                reply = _read_line(self._control)
            if reply is None:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_SECONDS)
                problem = f"{python} {_format_end(self._process.returncode)}; {self._last_lines()}"
            elif "error" in reply:
                problem = self._load_problem(python, reply)
        except TimeoutError:
            problem = (
                f"{python} had not loaded it after {settings.start_timeout:g} s; raise start_timeout if it "
                f"only needs more time; {self._last_lines()}"
            )
        if problem is not None:
            self._end()
            raise ConfigError(f"the {self._name} environment cannot start: {problem}")

    def _load_problem(self, python: str, reply: Mapping[str, Any]) -> str:
        """Return the reason for which the server could not load the environment."""
        if reply["missing"]:
            return (
                f"{python} has no module {reply['missing']!r}; run {python} -m pip install "
                f"{self._settings.packages}, or set python= or requirements="
            )
        return _shown(reply["error"])

    def _last_lines(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - (1 << 16)))
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines()]
        last = [line for line in lines if line][-_LAST_LINES:]
        return f"its last lines: {_shown(' | '.join(last))}" if last else "it printed nothing"

    def _end(self) -> None:
        if self._process is not None:
            self._control.close()
            self._log.close()
            self._process.kill()  # the anchor of the guard, which ends the rest
            self._process.wait()
            self._process = None


class RemoteEnvironment:
    """An environment in another process, as one episode uses it; a call may take `timeout` seconds."""

    def __init__(self, host: Host, connection: Any, timeout: float | None, replay: Replay) -> None:
        self.replay: Replay = replay
        self._host = host
        self._reader, self._writer = connection
        self._timeout = timeout

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of the environment and return its result.

        Raises:
            EpisodeError: if it raises, its process ends, or it takes too long.
        """
        try:
            async with asyncio.timeout(self._timeout):
                with suppress(OSError):  # a lost connection is found by reading
                    self._writer.write(_request(method, arguments))
                    await self._writer.drain()
                line = await self._read_line()
        except TimeoutError:
            self._writer.close()
            raise EpisodeError(
                f"{method} took longer than step_timeout={self._timeout:g} s, so its process was ended"
            ) from None
        return self._host.read_reply(method, line)

    async def close(self) -> None:
        """Close the connection, which ends the environment's process or task."""
        self._writer.close()

    async def _read_line(self) -> bytes:
        try:
            line: bytes = await self._reader.readline()
        except ValueError:
            raise EpisodeError(f"an environment replied with more than {MAX_REPLY >> 20} MiB") from None
        except OSError:
            return b""
        return line


async def open_environment(
    adapter: str,
    settings: Mapping[str, Any],
    arguments: Mapping[str, Any],
    timeout: float | None = None,
    replay: Replay = "again",
) -> RemoteEnvironment:
    """Open an environment of an episode: `await engine.environment(open_environment, adapter=...)`.

    Args:
        adapter: a name of `ENVIRONMENTS`.
        settings: knobs of the adapter's node, such as `{"id": "FrozenLake-v1"}`; others have their defaults.
        arguments: the arguments of `open` in the adapter's `remote.py`, such as `{"seed": 1}`.
        timeout: seconds that one call may take; None: no limit.
        replay: what is done when the episode is replayed, see `Replay`.

    Raises:
        ConfigError: if the environment cannot be started.
        EpisodeError: if it cannot be opened.
    """
    host = host_of(adapter, settings)
    connection = await asyncio.to_thread(host.connect)
    connection.setblocking(False)
    streams = await asyncio.open_connection(sock=connection, limit=MAX_REPLY)
    environment = RemoteEnvironment(host, streams, timeout, replay)
    try:
        await environment.call("open", **arguments)
    except BaseException:
        await environment.close()
        raise
    return environment


_hosts: dict[tuple[str, HostSettings], Host] = {}
_hosts_lock = threading.Lock()


def host_of(adapter: str, settings: Mapping[str, Any]) -> Host:
    """Return the server for an adapter's node with these knobs, which all episodes of this process share.

    Raises:
        PlanError: for an unknown adapter.
        ConfigError: for wrong knobs.
    """
    key = adapter, adapter_named(adapter).host_settings(settings)
    with _hosts_lock:
        return _hosts.setdefault(key, Host(*key))


def close_hosts() -> None:
    """End all servers of this process."""
    with _hosts_lock:
        hosts = list(_hosts.values())
        _hosts.clear()
    for host in hosts:
        host.close()


def _request(method: str, arguments: Mapping[str, Any]) -> bytes:
    return json.dumps({"method": method, "arguments": arguments}).encode() + b"\n"


def _read_line(connection: socket.socket) -> dict[str, Any] | None:
    """Return the JSON object in the first line; None if there is none."""
    with connection.makefile("rb", buffering=0) as stream:
        line = stream.readline()
    found: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return found


def _format_end(code: int | None) -> str:
    """Return the end of a process in words, by its exit code: -N or 128 + N for signal N; None: unknown."""
    if code is None:
        return "has ended"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code if code < 0 else code - 128).name}"
    return f"ended with exit code {code}"


def _shown(text: str) -> str:
    return str(mask_secrets(shorten(text, _MAX_REASON)))
