"""A multiprocessing context whose children are forked from a small, clean server process.

The standard contexts either fork this process (with its threads, torch and CUDA) or run the main script
again in every child, which imports ray in a Ray actor, and runs a script without a `__main__` guard twice.
Children of this context import only what their task needs, and start in milliseconds.

Each child is the leader of a session. What it starts ends with it, and everything ends with this process
(`hflow.processes.guard`).
"""

from __future__ import annotations

import io
import itertools
import os
import shutil
import tempfile
import time
from multiprocessing import forkserver, popen_forkserver, process, reduction, spawn, synchronize, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess, set_spawning_popen
from typing import Any

from hflow.base.standard_streams import outlive_reader
from hflow.processes.guard import (
    POLL_SECONDS,
    SHARED_FILES,
    continue_stopped,
    run_in_session,
    shared_file_prefix,
)

_PRELOADED = ["hflow.processes.forkserver_guard", "hflow.workers.bodies.pool_child"]
"""What the server imports when it starts, in this order."""

RESTART_SECONDS = 10.0
"""Longest time for which a process is tried to be started when the server was killed."""

_server = forkserver.ForkServer()
_server.set_forkserver_preload(_PRELOADED)


class _Popen(popen_forkserver.Popen):
    """The standard launch, but from our server and without the parent's main module."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        preparation = spawn.get_preparation_data(process_obj.name)
        preparation.pop("init_main_from_name", None)
        preparation.pop("init_main_from_path", None)
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        deadline = time.monotonic() + RESTART_SECONDS
        while True:
            try:
                self._start(message)
                return
            except (OSError, EOFError):  # the server was killed
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)

    def _start(self, message: io.BytesIO) -> None:
        _use_own_directory()
        sentinel, to_child = _server.connect_to_new_process(self._fds)
        try:
            with open(to_child, "wb", closefd=False) as pipe:
                pipe.write(message.getbuffer())
            while not wait([sentinel], POLL_SECONDS):
                continue_stopped(_server._forkserver_pid)  # type: ignore[attr-defined]
            self.pid = forkserver.read_signed(sentinel)
        except BaseException:
            _close(to_child, sentinel)
            raise
        self.sentinel = sentinel
        self.finalizer = util.Finalize(self, _close, (to_child, sentinel))


def _use_own_directory() -> None:
    """Let multiprocessing keep the server's socket where a guard removes it if this process is killed."""
    config: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        directory = tempfile.mkdtemp(prefix=shared_file_prefix(os.getpid()), dir=SHARED_FILES)
        util.Finalize(None, shutil.rmtree, (directory, True), exitpriority=-100)
        config["tempdir"] = directory


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class CleanProcess(ForkServerProcess):
    """A process started by the clean server."""

    def run(self) -> None:
        """Run the target in a session of its own. What it prints may have no reader any more."""
        run_in_session()
        outlive_reader("stdout", "stderr")
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)


class _RLock(synchronize.RLock):
    """The standard lock, with a name by which a guard finds it."""

    _suffixes = itertools.count()

    @staticmethod
    def _make_name() -> str:
        return f"/{shared_file_prefix(os.getpid())}{next(_RLock._suffixes)}"


class CleanContext(ForkServerContext):
    """A context to pass as `mp_context`. What it makes is removed when this process ends in any way."""

    Process = CleanProcess

    def RLock(self) -> synchronize.RLock:
        """Return a lock that processes share."""
        return _RLock(ctx=self.get_context())
