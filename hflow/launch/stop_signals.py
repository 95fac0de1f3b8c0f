"""`StopSignals`: Ctrl-C and SIGTERM ask a run to stop; a second signal ends it at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Handles the signals that schedulers and people send to end a run. It belongs to the running event loop.

    Args:
        note: shows a line to the user.

    Attributes:
        is_requested: whether a signal has come.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.is_requested = False
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stop: Callable[[], None] | None = None
        self.install()

    def install(self) -> None:
        """Handle signals. Called again after a library may have set handlers of its own."""
        if not self.is_requested:
            for number in SIGNALS:
                self._loop.add_signal_handler(number, self._on_signal)

    def remove(self) -> None:
        """Let signals end the process."""
        for number in SIGNALS:
            self._loop.remove_signal_handler(number)

    def stop_by(self, stop: Callable[[], None] | None) -> None:
        """Call a function at the first signal; None: cancel the task."""
        self._stop = stop
        self.install()
        if self.is_requested and stop is not None:
            stop()

    def _on_signal(self) -> None:
        self.is_requested = True
        self.remove()
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
