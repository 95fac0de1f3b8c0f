"""Spans of a run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process of the trace is a worker (the controller comes first); a thread is a lane of a worker. Viewers
require the spans of one thread to be nested, so spans of a lane that overlap otherwise get more threads.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hflow.base.durable_files import replace_text
from hflow.workers.interface import Span

MAX_SPANS = 20_000
"""Spans of one lane that are kept; in a long run, the last ones."""
CONTROLLER = -1
"""The worker index of the controller's own spans."""


class Trace:
    """Collects the last spans of each lane in memory and writes them to a file.

    Args:
        max_spans: spans of one lane that are kept.
    """

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self._lanes: dict[tuple[int, str], deque[Span]] = defaultdict(lambda: deque(maxlen=max_spans))

    def add(self, worker: int, span: Span) -> None:
        """Add a span of a worker (`CONTROLLER` for the controller)."""
        self._lanes[worker, span.lane].append(span)

    def write(self, path: Path) -> None:
        """Write the kept spans as one JSON file.

        Raises:
            WriteError: when it cannot be written.
        """
        replace_text(path, json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))

    def events(self) -> list[dict[str, Any]]:
        """Return the trace events: names of processes and threads, then one complete event per span.

        Times are microseconds since the start of the first span that is kept.
        """
        origin = min((span.start for spans in self._lanes.values() for span in spans), default=0.0)
        names, span_events = [], []
        workers: set[int] = set()
        for tid, (worker, lane, spans) in enumerate(self._rows(), start=1):
            if worker not in workers:
                workers.add(worker)
                names += _process_events(worker)
            names.append(_name_event("thread_name", worker, tid, lane))
            span_events += [_span_event(span, worker, tid, origin) for span in spans]
        return names + span_events

    def _rows(self) -> Iterator[tuple[int, str, list[Span]]]:
        """Yield (worker, name of the thread, its nested spans), sorted by worker and lane."""
        for (worker, lane), spans in sorted(self._lanes.items()):
            for index, row in enumerate(nested_rows(spans)):
                yield worker, lane if index == 0 else f"{lane} ({index + 1})", row


def nested_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Split spans into rows in which they are properly nested. A greedy pass keeps the rows few."""
    rows: list[list[Span]] = []
    open_spans: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for row, stack in zip(rows, open_spans, strict=True):
            while stack and stack[-1].end <= span.start:
                stack.pop()
            if not stack or span.end <= stack[-1].end:
                row.append(span)
                stack.append(span)
                break
        else:
            rows.append([span])
            open_spans.append([span])
    return rows


def _pid(worker: int) -> int:
    return worker - CONTROLLER


def _process_events(worker: int) -> list[dict[str, Any]]:
    name = "controller" if worker == CONTROLLER else f"worker {worker}"
    order = {
        "ph": "M",
        "name": "process_sort_index",
        "pid": _pid(worker),
        "args": {"sort_index": _pid(worker)},
    }
    return [_name_event("process_name", worker, 0, name), order]


def _name_event(kind: str, worker: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _pid(worker), "tid": tid, "args": {"name": name}}


def _span_event(span: Span, worker: int, tid: int, origin: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.lane,
        "pid": _pid(worker),
        "tid": tid,
        "ts": round((span.start - origin) * 1e6),
        "dur": round((span.end - span.start) * 1e6),
        "args": dict(span.args),
    }
