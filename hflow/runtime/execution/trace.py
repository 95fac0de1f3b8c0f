"""Spans of a run as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

A process of the trace is a worker (the controller comes first), a thread is a lane. Viewers
want the slices of one thread nested: spans of a lane that overlap otherwise get further rows.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hflow.workers.interface import Span

MOST_SPANS = 20_000
"""Spans of one lane that are kept: of a long run its last ones."""
CONTROLLER = -1
"""The worker index under which the controller's own spans are added."""


class Trace:
    """Collects spans in memory, the last ones of each lane, and writes them once."""

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._lanes: dict[tuple[int, str], deque[Span]] = defaultdict(lambda: deque(maxlen=most))

    def add(self, worker: int, span: Span) -> None:
        """Add a span of a worker (`CONTROLLER` for the controller)."""
        self._lanes[worker, span.lane].append(span)

    def write(self, path: Path) -> None:
        """Write everything added so far as one JSON file."""
        path.write_text(json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"}))

    def events(self) -> list[dict[str, Any]]:
        """Trace events: names of processes and threads, then one complete event a span.

        Times are microseconds since the start of the first span that is kept.
        """
        origin = min((span.start for spans in self._lanes.values() for span in spans), default=0.0)
        named, complete = [], []
        workers: set[int] = set()
        for tid, (worker, lane, spans) in enumerate(self._rows(), start=1):
            if worker not in workers:
                workers.add(worker)
                named += _process(worker)
            named.append(_name("thread_name", worker, tid, lane))
            complete += [_complete(span, worker, tid, origin) for span in spans]
        return named + complete

    def _rows(self) -> Iterator[tuple[int, str, list[Span]]]:
        """(worker, row's name, its nested spans), sorted by worker and lane."""
        for (worker, lane), spans in sorted(self._lanes.items()):
            for index, row in enumerate(nested_rows(spans)):
                yield worker, lane if index == 0 else f"{lane} ({index + 1})", row


def nested_rows(spans: Iterable[Span]) -> list[list[Span]]:
    """Split spans into as few rows as a greedy pass needs for each to be properly nested."""
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


def _process(worker: int) -> list[dict[str, Any]]:
    name = "controller" if worker == CONTROLLER else f"worker {worker}"
    order = {
        "ph": "M",
        "name": "process_sort_index",
        "pid": _pid(worker),
        "args": {"sort_index": _pid(worker)},
    }
    return [_name("process_name", worker, 0, name), order]


def _name(what: str, worker: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _pid(worker), "tid": tid, "args": {"name": name}}


def _complete(span: Span, worker: int, tid: int, origin: float) -> dict[str, Any]:
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
