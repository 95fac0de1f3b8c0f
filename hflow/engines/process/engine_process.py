"""What a worker and the process of its engine send each other. Importing this imports no library.

`EngineProcess`: calls the process of an engine, and receives its results.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
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
    guests: tuple[tuple[ModelSettings, TokenizerSettings | None], ...] = ()
    """Other models that use the weights of this one, beside adapters of their own."""


class EngineCall(NamedTuple):
    """A method of `Stepper` to call. Calls are performed in the order of their sending."""

    model: str
    """The name of the model whose `Stepper` it is for."""
    method: str
    arguments: tuple[Any, ...]
    has_reply: bool
    """Whether the process answers with a `EngineReply`."""


class EngineReply(NamedTuple):
    """The answer to a call."""

    model: str
    value: Any = None
    error: Exception | None = None
    """The `HflowError` that the call raised. The process continues."""


class FinishedRequests(NamedTuple):
    """Requests that have finished."""

    model: str
    results: list[tuple[int, GenerationResult]]


class EngineFailed(NamedTuple):
    """The last message of a process that cannot continue."""

    error: Exception
    """A `HflowError`."""


_MODULE = "hflow.engines.process.engine_main"
_REPLY_SECONDS = 0.1
"""Longest time that one model waits for a message while others may not look for theirs."""


class EngineProcess:
    """The child process of one engine, which serves one or several models. Each has a thread here.

    Attributes:
        directory: a temporary directory, removed by `close`.
    """

    def __init__(self, name: str, log: Path | None) -> None:
        """Prepare. What it prints is appended to `log`; None: a file in `directory`."""
        advice = "start the run again from its last checkpoint"
        self._process = ChildProcess(name, _MODULE, advice, log)
        self.directory = self._process.directory
        self._shared_memory: list[str] = []
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._arrived = defaultdict[str, deque[EngineReply | FinishedRequests]](deque)
        """Model -> messages that came while another model waited for one of its own."""
        self._failure: Exception | None = None

    def start(self, environment: Mapping[str, str], first_message: ProcessSettings) -> None:
        """Start the process, and wait until its engine is built from the settings.

        `environment` has variables besides those of this process.

        Raises:
            HflowError: when it cannot be built.
        """
        self._process.start(environment)
        try:
            self._process.connection.send(first_message)
            self._shared_memory = self.wait_reply(first_message.settings.name, [])
        except BaseException:
            self.close()
            raise

    def send(self, calls: Sequence[EngineCall]) -> None:
        """Send calls.

        Raises:
            RunError: when the process has ended.
        """
        try:
            with self._sending:
                self._process.connection.send(calls)
        except OSError:
            self.receive(calls[0].model, 0)  # raises what ended it, if it could say so
            raise self._process.exit_error() from None

    def receive(self, model: str, seconds: float) -> EngineReply | FinishedRequests | None:
        """Return the next message for a model; None if there is none within some seconds.

        Raises:
            HflowError: when the process has failed or ended.
        """
        connection = self._process.connection
        with self._receiving:
            if self._arrived[model]:
                return self._arrived[model].popleft()
            if self._failure is not None:
                raise self._failure
            try:
                if not connection.poll(seconds):
                    return None
                message: EngineReply | FinishedRequests | EngineFailed = connection.recv()
            except (EOFError, OSError):
                raise self._process.exit_error() from None
            if isinstance(message, EngineFailed):
                self._failure = message.error
                raise message.error
            if message.model == model:
                return message
            self._arrived[message.model].append(message)
            return None

    def wait_reply(self, model: str, finished: list[Any]) -> Any:
        """Wait for a reply for a model, and append the results that come before it to `finished`.

        Raises:
            HflowError: what the call raised, or when the process has failed or ended.
        """
        while True:
            message = self.receive(model, _REPLY_SECONDS)
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
