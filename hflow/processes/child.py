"""`ChildProcess`: a child process of an engine, from its start to the end of all of its children."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from hflow.base.errors import WorkerFailureError

_END_SECONDS = 20.0
"""Longest wait for a process to end by itself."""
_LOG_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Exit)\b: .+)$")
"""The last line of a traceback, behind any prefix of a log's lines."""


class ChildProcess:
    """A child process that ends when this process closes the connection, also by dying.

    It has a process group of its own, so that it receives no Ctrl-C of the terminal, and so that it and
    all of its children can be killed at once.

    Args:
        module: the module that it runs. Its first argument is the file descriptor of the connection.
        advice: what to do when it ends without an error in its log.
        log: the file to which what it prints is appended; None: one in `directory`.

    Attributes:
        directory: a temporary directory, removed by `close`.
        connection: the connection to the process, once it was started.
    """

    def __init__(self, name: str, module: str, advice: str, log: Path | None = None) -> None:
        self._name = name
        self._module = module
        self._advice = advice
        self._temporary = tempfile.TemporaryDirectory(prefix="hflow-engine-", ignore_cleanup_errors=True)
        self.directory = Path(self._temporary.name)
        self._log = log or self.directory / "log"
        self._log_start = 0
        """Bytes in the log before this process was started."""
        self._process: subprocess.Popen[bytes] | None = None
        self.connection: Connection

    def start(self, environment: Mapping[str, str], arguments: Sequence[str] = ()) -> None:
        """Start the process with more variables, and with arguments after the file descriptor."""
        ours, theirs = socket.socketpair()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno()), *arguments],
                env={**os.environ, **import_path(), **self._temporary_files(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """Id of the process, once it was started."""
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process is not None and self._process.poll() is not None

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the process has ended, for some seconds at most; None: without a limit."""
        with suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(seconds)

    def exit_error(self) -> WorkerFailureError:
        """Return the error with which the process has ended, after it had time to."""
        assert self._process is not None
        self.wait(_END_SECONDS)
        code, reason = self._process.returncode, _last_error(self._log, self._log_start)
        if code is None:
            how = "closed its connection"
        else:
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            )
        advice = f": {reason}" if reason else f"; {self._advice}"
        return WorkerFailureError(f"{self._name} (process {self.pid}) {how}{advice}")

    def close(self) -> None:
        """End the process and all of its children. Safe to call twice."""
        if self._process is not None:
            self.connection.close()
            self.wait(_END_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # and what outlived it
            self._process.wait()
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


def _last_error(log: Path, start: int) -> str | None:
    """Return the message of the last traceback in a log after some bytes, None if there is none."""
    text = log.read_bytes()[start:].decode(errors="replace") if log.exists() else ""
    lines = text.splitlines()
    errors = [match.group(1) for line in lines if (match := _LOG_ERROR.search(line.rstrip()))]
    causes = [error for error in errors if "See stack trace for root cause" not in error]
    return (causes or errors or [None])[-1]


def import_path() -> dict[str, str]:
    """Return variables with which a child process imports this hflow, which need not be installed."""
    paths = [str(Path(__file__).parents[2]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
