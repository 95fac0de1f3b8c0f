"""`Mailbox`: what happened on a worker since its last poll, one message a wake-up."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable

from hflow.workers.interface import Report, Span, WorkerEvent

LINGER_SECONDS = 0.01
"""Longest time that an event waits for others while more are to come: a message costs the controller
and the worker as much as many events."""
PAUSE_A_WORKER = 0.001


def pause_seconds(num_workers: int) -> float:
    """Least time from one report of a worker to the next while more is to come.

    So many workers together send no more reports than a few do, a thousand a second; an event that comes
    after a quiet time is reported as soon as ever.
    """
    return PAUSE_A_WORKER * num_workers


class Mailbox:
    """Filled by any thread, emptied by the poll. An error, once put, is raised by every poll.

    The last event that is to come is reported at once, together with those before it.
    """

    def __init__(self, worker: int, pause: float = 0.0, linger: float = LINGER_SECONDS) -> None:
        """Begin.

        Args:
            worker: whose events these are.
            pause: least seconds from one report to the next while more is to come.
            linger: least seconds that an event waits for others then.
        """
        self._worker = worker
        self._pause = pause
        self._linger = linger
        self._reported_at = -math.inf
        self._changed = threading.Condition()
        self._events: list[WorkerEvent] = []
        self._spans: list[Span] = []
        self._error: BaseException | None = None
        self._closed = False
        self._num_due = 0

    def expect(self, num_events: int) -> None:
        """So many more events will be put."""
        with self._changed:
            self._num_due += num_events

    def put(self, events: Iterable[WorkerEvent]) -> None:
        """Report events."""
        with self._changed:
            num_before = len(self._events)
            self._events.extend(events)
            self._num_due -= len(self._events) - num_before
            self._changed.notify()

    def note(self, span: Span) -> None:
        """Report a span with whatever event comes next."""
        with self._changed:
            self._spans.append(span)

    def fail(self, error: BaseException) -> None:
        """Report that a background thread cannot go on."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify()

    def close(self) -> None:
        """Let a waiting poll return."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self) -> Report:
        """Wait until there are events (or the mailbox is closed) and take all there is.

        Raises:
            BaseException: whatever a background thread failed with.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._is_over())
            patience = max(self._linger, self._reported_at + self._pause - time.monotonic())
            self._changed.wait_for(lambda: self._num_due <= 0 or self._is_over(), patience)
            if self._error is not None:
                raise self._error
            report = Report(self._worker, tuple(self._events), tuple(self._spans))
            self._events, self._spans = [], []
            self._reported_at = time.monotonic()
            return report

    def _is_over(self) -> bool:
        return self._closed or self._error is not None
