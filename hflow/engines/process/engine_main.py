"""The process of an engine: it runs the engine of a library, and performs what the worker asks for.

Between two steps of the engine it performs the calls that have arrived, in order. It ends when the worker
closes the connection or dies.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from hflow.base.errors import BackendError, HflowError, WorkerFailureError
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.engines.process.engine_process import (
    EngineCall,
    EngineFailed,
    EngineReply,
    FinishedRequests,
    ProcessSettings,
    remove_files,
)

if TYPE_CHECKING:
    from hflow.engines.process.stepper import Stepper
from hflow.engines.request import Decode


class EngineLoop:
    """Receives calls from the worker, steps the engine, and sends results."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._inbox: SimpleQueue[Sequence[EngineCall]] = SimpleQueue()
        self._steppers: dict[str, Stepper] = {}
        """Model -> its stepper; the others' are guests of the first one's."""
        self._settings: ProcessSettings
        self._ranks: list[multiprocessing.process.BaseProcess] = []
        self._shared_memory: list[str] = []

    def run(self) -> None:
        """Build the engine, then serve until the connection is closed."""
        self._settings = settings = self._connection.recv()
        threading.Thread(target=self._receive, name="hflow-receive", daemon=True).start()
        try:
            self._build(settings)
            self._send(EngineReply(settings.settings.name, self._shared_memory))
            while True:
                self._perform(self._next_calls())
                for model, stepper in self._steppers.items():
                    if stepper.num_unfinished and (finished := stepper.step()):
                        self._send(FinishedRequests(model, finished))
        except HflowError as error:
            self._fail(error)
        except BaseException as error:  # noqa: BLE001  the worker raises it
            traceback.print_exc()
            self._fail(self._rank_death(0) or _translated(settings, error))

    def _build(self, settings: ProcessSettings) -> None:
        if settings.cores:
            os.sched_setaffinity(0, settings.cores)
        module, _, name = settings.stepper.partition(":")
        build: Callable[[ProcessSettings, Decode | None], Stepper] = getattr(
            importlib.import_module(module), name
        )
        stepper = self._steppers[settings.settings.name] = build(settings, _decode(settings.tokenizer))
        for model, tokenizer in settings.guests:
            self._steppers[model.name] = stepper.make_guest(model, _decode(tokenizer))
        self._ranks = multiprocessing.active_children()
        self._shared_memory = _shared_memory([os.getpid(), *(rank.pid for rank in self._ranks if rank.pid)])
        if self._ranks:
            threading.Thread(target=self._watch, name="hflow-ranks", daemon=True).start()

    def _next_calls(self) -> list[EngineCall]:
        """Return all calls that have arrived; wait for some if the engine has nothing to do."""
        calls: list[EngineCall] = []
        try:
            while True:
                is_idle = not calls and not any(one.num_unfinished for one in self._steppers.values())
                calls.extend(self._inbox.get(block=is_idle))
        except Empty:
            return calls

    def _perform(self, calls: Sequence[EngineCall]) -> None:
        for call in calls:
            method = getattr(self._steppers[call.model], call.method)
            if not call.has_reply:
                method(*call.arguments)
                continue
            try:
                self._send(EngineReply(call.model, method(*call.arguments)))
            except HflowError as error:
                self._send(EngineReply(call.model, error=error))

    def _send(self, message: Any) -> None:
        with self._sending:
            self._connection.send(message)

    def _receive(self) -> None:
        """Receive calls, on a thread, so that the process ends with the worker even during a step."""
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except (EOFError, OSError):
            shutil.rmtree(self._settings.temporary, ignore_errors=True)
            self._end(0)

    def _watch(self) -> None:
        """End the process when a rank dies. A library may wait for the rank first."""
        death = self._rank_death(None)
        assert death is not None
        self._fail(death)

    def _rank_death(self, seconds: float | None) -> WorkerFailureError | None:
        """Wait until a rank has died; return an error that names it, None if all live after some seconds."""
        sentinels = [rank.sentinel for rank in self._ranks]
        for dead in wait(sentinels, seconds):
            assert isinstance(dead, int)
            number = sentinels.index(dead)
            pid = self._ranks[number].pid
            return WorkerFailureError(f"tensor rank {number} of {self._settings.name} (process {pid}) died")
        return None

    def _fail(self, error: Exception) -> None:
        """Tell the worker why the process ends, and end it."""
        with suppress(OSError):
            self._send(EngineFailed(error))
        self._end(1)

    def _end(self, code: int) -> None:
        """End the process and its ranks at once. A library may wait for ranks that do not end."""
        for rank in self._ranks:
            with suppress(ProcessLookupError, ValueError):
                rank.kill()
        remove_files(self._shared_memory)
        os._exit(code)


def _decode(settings: TokenizerSettings | None) -> Decode | None:
    return None if settings is None else TextTokenizer(settings).decode_answer


def _shared_memory(processes: Sequence[int]) -> list[str]:
    """Return the files of the shared memory of processes, which they do not remove when they are killed."""
    lines = [line for process in processes for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    files = {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return sorted(file for file in files if not file.endswith(" (deleted)"))


def _translated(settings: ProcessSettings, error: BaseException) -> BackendError:
    """Return an error of the library in one line."""
    reason, model = " ".join(str(error).split()), settings.settings.name
    return BackendError(
        f"model {model!r}: {settings.library} failed with {type(error).__name__}: {reason:.300}"
    )


def main() -> None:
    """Run the process. The argument is the file descriptor of the connection to the worker."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # the ranks must not keep it open
    EngineLoop(Connection(socket.socket(fileno=descriptor).detach())).run()


if __name__ == "__main__":
    main()
