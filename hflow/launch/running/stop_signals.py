"""The signals by which people and schedulers end a run."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from weakref import WeakSet


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals by which people, schedulers and a terminal that is closed ask a process to end.

    SIGHUP is none where it is ignored, as `nohup` lets it be.
    """
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return signal.SIGINT, signal.SIGTERM, *(() if ignores else (signal.SIGHUP,))


SAME_REQUEST_SECONDS = 2.0
"""Signals that follow within this time are one request: schedulers and wrappers send one to a process and to
its group."""


_active: WeakSet[StopSignals] = WeakSet()
"""The handlers of the runs that are going."""


def request_stop() -> bool:
    """Ask all runs of this process to stop, as Ctrl-C does. Returns whether one had not been asked before."""
    asked = [signals for signals in tuple(_active) if not signals.is_requested]
    for signals in asked:
        signals.request()
    return bool(asked)


class StopSignals:
    """Handles the signals that schedulers and people send to end a run. It belongs to the running event loop.

    Ctrl-C, SIGTERM and SIGHUP ask a run to stop; a second signal ends it at once. Only the main thread
    receives signals: where the loop runs in another one, `request_stop` asks in their place.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._requested_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stop: Callable[[], None] | None = None
        self._signals = stop_signals()
        self._is_in_main_thread = threading.current_thread() is threading.main_thread()
        _active.add(self)
        self.install()

    @property
    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self._requested_at is not None

    def install(self) -> None:
        """Handle signals. Called again after a library may have set handlers of its own."""
        if self._is_in_main_thread:
            for number in self._signals:
                self._loop.add_signal_handler(number, self._on_signal, number)

    def remove(self) -> None:
        """Let signals end the process."""
        _active.discard(self)
        if self._is_in_main_thread:
            for number in self._signals:
                self._loop.remove_signal_handler(number)

    def stop_by(self, stop: Callable[[], None] | None) -> None:
        """Call a function at the first signal; None: cancel the task."""
        self._stop = stop
        self.install()
        if self.is_requested and stop is not None:
            stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._requested_at is not None:
            if time.monotonic() - self._requested_at > SAME_REQUEST_SECONDS:
                self.remove()
                os.kill(os.getpid(), number)
            return
        self._request()

    def request(self) -> None:
        """Ask the run to stop. Called from any thread."""
        self._loop.call_soon_threadsafe(self._request)

    def _request(self) -> None:
        if self._requested_at is not None:
            return
        self._requested_at = time.monotonic()
        if self._stop is None:
            self._note("stopping")
            assert self._task is not None
            self._task.cancel()
        else:
            self._note(
                "stopping: the step that has begun is completed, and the run is saved; a second Ctrl-C ends "
                "it at once"
            )
            self._stop()
