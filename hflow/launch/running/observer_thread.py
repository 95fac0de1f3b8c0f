"""`ObserverThread`: calls observers one after the other, so that a slow tracker does not slow a run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from hflow.base.errors import ConfigError, HflowError, shorten
from hflow.observer import Observer, RunInfo
from hflow.processes.error_location import error_line
from hflow.trackers.interface import Tracker

CLOSE_SECONDS = 60.0
"""Longest wait for observers when a run ends."""
MAX_ERROR = 300
"""Characters of an observer's error in a message. MLflow's are longer than a screen."""

_Call = Callable[[Observer], None]


class ObserverThread:
    """Passes what a run reports to observers, one after the other."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="hflow-observers", daemon=True)
        self._is_closed = False

    def start(self, run: RunInfo) -> None:
        """Start the observers. If one cannot start, end those that have.

        Raises:
            ConfigError: if one cannot start.
        """
        with ExitStack() as started:
            for observer in self._observers:
                try:
                    observer.start(run)
                except HflowError:
                    raise
                except Exception as error:
                    raise ConfigError(
                        f"{_name(observer)} cannot start: {_error(error)}; correct its settings, or remove it"
                    ) from error
                started.callback(_end_failed, observer)
            started.pop_all()
        self._thread.start()

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of every observer, later."""
        self._calls.put(lambda observer: getattr(observer, method)(*arguments))

    def failures(self) -> Iterator[str]:
        """Yield a warning for each observer that has failed since the last call."""
        while not self._failures.empty():
            yield self._failures.get()

    def close(self, reason: str) -> None:
        """Call `on_end`, and wait until the observers have taken everything; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.send("on_end", reason)
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            names = ", ".join(map(_name, self._observers))
            self._failures.put(
                f"{names} did not finish within {CLOSE_SECONDS:.0f} s; what was not sent is lost"
            )

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            for observer in tuple(self._observers):
                try:
                    call(observer)
                except Exception as error:  # noqa: BLE001 - a user's observer may raise anything
                    self._observers.remove(observer)
                    self._failures.put(f"{_name(observer)} failed and is off: {_error(error)}")


def _end_failed(observer: Observer) -> None:
    """End an observer because another cannot start; that error is the one to report."""
    with suppress(Exception):
        observer.on_end("failed")


def _name(observer: Observer) -> str:
    return observer.key if isinstance(observer, Tracker) else type(observer).__name__


def _error(error: Exception) -> str:
    return shorten(error_line(error), MAX_ERROR)
