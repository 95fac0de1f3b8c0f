"""Starts the process of a vLLM engine, talks to it, and ends it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hflow
from hflow.backends.vllm_engine.messages import EngineCall, EngineFailed, EngineReply, FinishedRequests
from hflow.errors import RunError

_MODULE = "hflow.backends.vllm_engine.process"
_END_SECONDS = 10.0
"""Longest wait for a process to end by itself."""
_LOG_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .+)$")
"""The last line of a traceback, behind the prefix with which vLLM marks its ranks."""


class EngineProcess:
    """The child process of one engine.

    It ends when this process closes the connection, also by dying. It has a process group of its own, so that
    it receives no Ctrl-C of the terminal, and so that all of vLLM can be killed at once.

    Attributes:
        directory: a temporary directory, removed by `close`.
    """

    def __init__(self, name: str) -> None:
        """Prepare.

        Args:
            name: the model's, for errors.
        """
        self._name = name
        self._temporary = tempfile.TemporaryDirectory(prefix="hflow-vllm-", ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name)
        self._shared_memory: list[str] = []
        self._process: subprocess.Popen[bytes]
        self._connection: Connection

    def start(self, environment: Mapping[str, str], first_message: Any) -> None:
        """Start the process and wait until its engine is built.

        Args:
            environment: variables besides those of this process.
            first_message: what it is built from.

        Raises:
            HflowError: when it cannot be built.
        """
        ours, theirs = socket.socketpair()
        with theirs, open(self.directory / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                env={**os.environ, **import_path(), **self._temporary_files(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.send(first_message)
            self._shared_memory = self.wait_reply([])
        except BaseException:
            self.close()
            raise

    def send(self, calls: Sequence[EngineCall]) -> None:
        """Send calls.

        Raises:
            RunError: when the process has ended.
        """
        try:
            self._connection.send(calls)
        except OSError:
            self.receive(0)  # raises what ended it, if it could say so
            raise self._death() from None

    def receive(self, seconds: float) -> EngineReply | FinishedRequests | None:
        """Return the next message; None if there is none within some seconds.

        Raises:
            HflowError: when the process has failed or ended.
        """
        try:
            if not self._connection.poll(seconds):
                return None
            message: EngineReply | FinishedRequests | EngineFailed = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, EngineFailed):
            raise message.error
        return message

    def wait_reply(self, finished: list[Any]) -> Any:
        """Wait for a reply, and append the results that come before it to `finished`.

        Raises:
            HflowError: what the call raised, or when the process has failed or ended.
        """
        while True:
            message = self.receive(60.0)
            if isinstance(message, EngineReply):
                if message.error is not None:
                    raise message.error
                return message.value
            if isinstance(message, FinishedRequests):
                finished.extend(message.results)

    def close(self) -> None:
        """End the process and all of its children. Safe to call twice."""
        if not hasattr(self, "_process"):
            self._temporary.cleanup()
            return
        self._connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # and ranks that outlived it
        self._process.wait()
        remove_files(self._shared_memory)  # if the process could not do that
        self._temporary.cleanup()

    def _temporary_files(self) -> dict[str, str]:
        """Return variables that put vLLM's sockets and rendezvous files into `directory`.

        vLLM does not remove them. What torch compiles stays in the cache that all processes share.
        """
        cache = Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
        return {
            "TMPDIR": str(self.directory),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(cache)),
        }

    def _death(self) -> RunError:
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its connection" if code is None else exit_text(code)
        reason = last_error(self.directory / "log")
        return RunError(
            f"the vLLM engine of {self._name!r} (process {self._process.pid}) {how}"
            + (f": {reason}" if reason else "; start the run again from its last checkpoint")
        )


def remove_files(files: Iterable[str]) -> None:
    """Remove files that may be gone already."""
    for file in files:
        Path(file).unlink(missing_ok=True)


def last_error(log: Path) -> str | None:
    """Return the message of the last traceback in a log, None if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    errors = [match.group(1) for line in lines if (match := _LOG_ERROR.search(line.rstrip()))]
    causes = [error for error in errors if "See stack trace for root cause" not in error]
    return (causes or errors or [None])[-1]


def exit_text(code: int) -> str:
    """Return how a process ended, for messages."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def import_path() -> dict[str, str]:
    """Return variables with which the child imports this hflow."""
    paths = [str(Path(hflow.__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
