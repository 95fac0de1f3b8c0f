"""What a worker and the process of its engine send each other. Importing this imports no library.

`EngineProcess`: calls the process of an engine, and receives its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hflow.data.text.tokenizer import TokenizerSettings
from hflow.engines.interface import GenerationResult
from hflow.models.settings import ModelSettings
from hflow.processes.child import ChildProcess


@dataclass(frozen=True)
class ProcessSettings:
    """What the process builds its engine from; the first message that it receives."""

    name: str
    """The engine's name, for errors."""
    library: str
    """The library's name, for errors."""
    stepper: str
    """`module:CLASS` of the library's `Stepper`, which only the process imports."""
    settings: ModelSettings
    arguments: Mapping[str, Any]
    """The arguments of the library's engine."""
    temporary: str
    """The worker's temporary directory for the engine, removed when the worker has ended."""
    tokenizer: TokenizerSettings | None
    cores: tuple[int, ...]
    """Processor cores of all tensor ranks; empty: those of the worker."""
    reads_checkpoint: bool
    """Whether the engine starts with the weights of a checkpoint; otherwise it has none before others are
    loaded."""
    sleeps: bool
    """Whether the engine frees its device memory while it sleeps."""
    records: tuple[str, ...]
    """What it records beside tokens, by kind."""


class EngineCall(NamedTuple):
    """A method of `Stepper` to call. Calls are performed in the order of their sending."""

    method: str
    arguments: tuple[Any, ...]
    has_reply: bool
    """Whether the process answers with a `EngineReply`."""


class EngineReply(NamedTuple):
    """The answer to a call."""

    value: Any = None
    error: Exception | None = None
    """The `HflowError` that the call raised. The process continues."""


class FinishedRequests(NamedTuple):
    """Requests that have finished."""

    results: list[tuple[int, GenerationResult]]


class EngineFailed(NamedTuple):
    """The last message of a process that cannot continue."""

    error: Exception
    """A `HflowError`."""


_MODULE = "hflow.engines.process.engine_main"


class EngineProcess:
    """The child process of one engine.

    Attributes:
        directory: a temporary directory, removed by `close`.
    """

    def __init__(self, name: str, log: Path | None) -> None:
        """Prepare.

        Args:
            name: the engine's, for errors.
            log: the file to which what it prints is appended; None: one in `directory`.
        """
        advice = "start the run again from its last checkpoint"
        self._process = ChildProcess(name, _MODULE, advice, log)
        self.directory = self._process.directory
        self._shared_memory: list[str] = []

    def start(self, environment: Mapping[str, str], first_message: Any) -> None:
        """Start the process and wait until its engine is built.

        Args:
            environment: variables besides those of this process.
            first_message: what it is built from.

        Raises:
            HflowError: when it cannot be built.
        """
        self._process.start(environment)
        try:
            self._process.connection.send(first_message)
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
            self._process.connection.send(calls)
        except OSError:
            self.receive(0)  # raises what ended it, if it could say so
            raise self._process.exit_error() from None

    def receive(self, seconds: float) -> EngineReply | FinishedRequests | None:
        """Return the next message; None if there is none within some seconds.

        Raises:
            HflowError: when the process has failed or ended.
        """
        connection = self._process.connection
        try:
            if not connection.poll(seconds):
                return None
            message: EngineReply | FinishedRequests | EngineFailed = connection.recv()
        except (EOFError, OSError):
            raise self._process.exit_error() from None
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
        self._process.close()
        remove_files(self._shared_memory)  # if the process could not do that


def remove_files(files: Iterable[str]) -> None:
    """Remove files that may be gone already."""
    for file in files:
        Path(file).unlink(missing_ok=True)
