"""`LiveFiles`: the files that show what a run does, written again and again while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hflow.base.durable_files import WriteError
from hflow.base.waiting import block_sigterm
from hflow.runtime.records.activity import Activity, write_activity
from hflow.runtime.records.trace import Trace

ACTIVITY_SECONDS = 0.5
"""Time between two looks at what the run does."""
TRACE_SECONDS = 1.0
"""Shortest time between two writes of the trace."""
TRACE_SHARE = 0.05
"""Largest share of the time in which the trace is written. A large one is written less often."""


class LiveFiles:
    """Writes a run's activity and its trace on a thread, which no step waits for.

    A run that is killed leaves both. What cannot be written, such as on a full disk, is left out: `close`
    writes the whole trace. `activity` is called on the thread; `close` deletes its file.
    """

    def __init__(
        self, trace: Trace, trace_file: Path, activity: Callable[[], Activity], activity_file: Path
    ) -> None:
        self._trace = trace
        self._trace_file = trace_file
        self._activity = activity
        self._activity_file = activity_file
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_until_closed, name="hflow-live-files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the whole trace, and delete the activity.

        Raises:
            WriteError: when the trace cannot be written.
        """
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            self._activity_file.unlink(missing_ok=True)
        self._trace.write(self._trace_file)

    def _write_until_closed(self) -> None:
        block_sigterm()
        written: Activity | None = None
        trace_due, num_spans = time.monotonic() + TRACE_SECONDS, 0
        while True:
            if (activity := self._activity()) != written:
                with suppress(OSError):
                    write_activity(self._activity_file, activity)
                    written = activity
            start = time.monotonic()
            if start >= trace_due and self._trace.num_added > num_spans:
                num_spans = self._trace.num_added
                with suppress(WriteError):
                    self._trace.write(self._trace_file)
                end = time.monotonic()
                trace_due = end + max(TRACE_SECONDS, (end - start) / TRACE_SHARE)
            if self._ended.wait(ACTIVITY_SECONDS):
                return
