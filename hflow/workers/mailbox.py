"""Collects what happens on a worker between two polls, so that one message reports many events."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

from hflow.types.body_line import BodyLine
from hflow.workers.interface import BodyRetry, Span, WorkerEvent, WorkerReport

LINGER_SECONDS = 0.01
"""Longest time that an event waits for others while more are due. A message costs the controller and the
worker as much as many events do."""
PAUSE_SECONDS_PER_WORKER = 0.001
ENGINE_LANE = "generate"
"""Lane of the spans of engines: each is a turn, from when the engine woke until it slept."""


def pause_seconds(num_workers: int) -> float:
    """Return the minimum time between two reports of a worker while more events are due.

    All workers together then send about a thousand reports a second, however many they are. An event after a
    quiet time is not delayed by this.
    """
    return PAUSE_SECONDS_PER_WORKER * num_workers


class Mailbox:
    """Filled by any thread, emptied by the poll. After an error every poll raises it.

    The last event that is due is reported at once, together with those before it.
    """

    def __init__(self, worker: int, pause: float = 0.0, linger: float = LINGER_SECONDS) -> None:
        """Create an empty mailbox of a worker, which pauses between reports while more events are due.

        `pause` is the least seconds between two reports then, and `linger` those that an event waits for
        others.
        """
        self._worker = worker
        self._pause = pause
        self._linger = linger
        self._reported_at = -math.inf
        self._changed = threading.Condition()
        self._events: list[WorkerEvent] = []
        self._spans: list[Span] = []
        self._retries: list[BodyRetry] = []
        self._lines: list[BodyLine] = []
        """Lines of which it is not known that they were received."""
        self._num_received = 0
        """Lines before these."""
        self._error: BaseException | None = None
        self._closed = False
        self._num_due = 0
        self._has_turn = False
        """Whether the turn of an engine has ended."""

    def expect(self, num_events: int) -> None:
        """Announce that so many more events will be put."""
        with self._changed:
            self._num_due += num_events

    def put(self, events: Iterable[WorkerEvent]) -> None:
        """Add events."""
        with self._changed:
            num_before = len(self._events)
            self._events.extend(events)
            self._num_due -= len(self._events) - num_before
            self._changed.notify()

    def add_span(self, span: Span) -> None:
        """Add a span, to be reported with the next event.

        That of an engine's turn is reported soon, as no event may come before its next turn.
        """
        with self._changed:
            self._spans.append(span)
            if span.lane == ENGINE_LANE:
                self._has_turn = True
                self._changed.notify()

    def add_retry(self, retry: BodyRetry) -> None:
        """Add a body that is tried again. It is reported soon, as no event may come for a long time."""
        with self._changed:
            self._retries.append(retry)
            self._changed.notify()

    def add_lines(self, lines: Iterable[BodyLine]) -> None:
        """Add what bodies have printed. It is reported soon, as no event may come for a long time."""
        with self._changed:
            self._lines.extend(lines)
            self._changed.notify()

    def lines_after(self, num_received: int) -> tuple[BodyLine, ...]:
        """Return the lines after those that were received before, which are dropped."""
        with self._changed:
            del self._lines[: num_received - self._num_received]
            self._num_received = num_received
            return tuple(self._lines)

    def fail(self, error: BaseException) -> None:
        """Let every poll raise the error of a background thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def close(self) -> None:
        """Let a waiting poll return."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self, num_received: int = 0) -> WorkerReport:
        """Wait for events, retries, a turn or lines, or until the mailbox is closed, and take everything.

        Lines are only copied: they may be lost on their way when the run ends.

        Raises:
            BaseException: the error that a background thread failed with.
        """
        with self._changed:
            self.lines_after(num_received)
            self._changed.wait_for(
                lambda: (
                    bool(self._events or self._retries or self._lines) or self._has_turn or self._is_over()
                )
            )
            delay = max(self._linger, self._reported_at + self._pause - time.monotonic())
            self._changed.wait_for(lambda: self._num_due <= 0 or self._is_over(), delay)
            if self._error is not None:
                raise self._error
            report = WorkerReport(
                self._worker,
                tuple(self._events),
                tuple(self._spans),
                tuple(self._retries),
                tuple(self._lines),
            )
            self._events, self._spans, self._retries, self._has_turn = [], [], [], False
            self._reported_at = time.monotonic()
            return report

    def _is_over(self) -> bool:
        return self._closed or self._error is not None
