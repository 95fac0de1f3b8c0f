"""`Mailbox`: what happened on a worker since its last poll, one message a wake-up."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hflow.workers.base import Report, Span, WorkerEvent

LEAST_LINGER = 0.01
LINGER_A_WORKER = 0.001


def linger_seconds(num_workers: int) -> float:
    """Longest time that an event waits for others while more are to come.

    A message costs the controller and the worker as much as many events. Many workers wait longer, so that
    all of them together do not send more messages than a few do: a thousand a second.
    """
    return max(LEAST_LINGER, LINGER_A_WORKER * num_workers)


class Mailbox:
    """Filled by any thread, emptied by the poll. An error, once put, is raised by every poll.

    The last event that is to come is reported at once, together with those before it.
    """

    def __init__(self, worker: int, linger: float = LEAST_LINGER) -> None:
        self._worker = worker
        self._linger = linger
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
            self._changed.wait_for(lambda: self._num_due <= 0 or self._is_over(), self._linger)
            if self._error is not None:
                raise self._error
            report = Report(self._worker, tuple(self._events), tuple(self._spans))
            self._events, self._spans = [], []
            return report

    def _is_over(self) -> bool:
        return self._closed or self._error is not None
