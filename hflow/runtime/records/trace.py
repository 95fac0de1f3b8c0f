"""Spans of a run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process of the trace is a worker (the controller comes first); a thread is a lane of a worker. Viewers
require the spans of one thread to be nested, so spans of a lane that overlap otherwise get more threads.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hflow.base.durable_files import replace_text
from hflow.workers.interface import Span

MAX_SPANS = 20_000
"""Spans of one lane that are kept; in a long run, the last ones."""
CONTROLLER = -1
"""The worker index of the controller's own spans."""


class Trace:
    """Collects the last `max_spans` spans of each lane in memory and writes them to a file."""

    def __init__(self, max_spans: int = MAX_SPANS) -> None:
        self._lanes: dict[tuple[int, str], deque[Span]] = defaultdict(lambda: deque(maxlen=max_spans))
        self._lock = threading.Lock()
        self.num_added = 0
        """Spans that were added, whether or not they are kept."""

    def add(self, worker: int, span: Span) -> None:
        """Add a span of a worker (`CONTROLLER` for the controller)."""
        with self._lock:
            self._lanes[worker, span.lane].append(span)
            self.num_added += 1

    def write(self, path: Path) -> None:
        """Write the kept spans as one JSON file, on any thread. The file is a whole trace at any time.

        Raises:
            WriteError: when it cannot be written.
        """
        with self._lock:
            end = time.time()
            lanes = {key: tuple(spans) for key, spans in sorted(self._lanes.items())}
        origin = min((span.start for spans in lanes.values() for span in spans), default=0.0)
        # One call of json for each event, as other threads wait during a call.
        events = ",\n".join(json.dumps(event) for event in _events(lanes, origin))
        other = json.dumps({"start": origin, "end": end})
        replace_text(
            path, f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [\n{events}\n]}}\n'
        )


def _events(lanes: Mapping[tuple[int, str], Sequence[Span]], origin: float) -> Iterator[dict[str, Any]]:
    """Yield the trace events: names of processes and threads, each followed by a complete event per span.

    Worker and lane are in the order in which they are shown. Events have microseconds since `origin`, when
    the trace begins, in seconds since the epoch.
    """
    workers: set[int] = set()
    tid = 0
    for (worker, lane), spans in lanes.items():
        for index, row in enumerate(nested_rows(spans)):
            tid += 1
            if worker not in workers:
                workers.add(worker)
                yield from _process_events(worker)
            name = lane if index == 0 else f"{lane} ({index + 1})"
            yield _name_event("thread_name", worker, tid, name)
            for span in row:
                yield _span_event(span, worker, tid, origin)


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
