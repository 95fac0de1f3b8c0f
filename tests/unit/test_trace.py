"""Traces of runs in the format of the trace viewer."""

import json
import threading
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from hflow.runtime.records.trace import CONTROLLER, Trace, nested_rows
from hflow.workers.interface import Span


def read(trace: Trace, path: Path) -> list[dict]:
    trace.write(path)
    return json.loads(path.read_text())["traceEvents"]


def test_a_trace_names_workers_and_lanes_and_places_spans(tmp_path: Path):
    trace = Trace()
    trace.add(1, Span("actor_train", "nodes", 1000.5, 1002.0, {"step": 3}))
    trace.add(CONTROLLER, Span("step 3", "steps", 1000.0, 1003.0))
    events = read(trace, tmp_path / "trace.json")
    names = {
        (e["name"], e["pid"]): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]
    }
    assert names == {
        ("process_name", 0): "controller",
        ("thread_name", 0): "steps",
        ("process_name", 2): "worker 1",
        ("thread_name", 2): "nodes",
    }
    spans = {e["name"]: e for e in events if e["ph"] == "X"}
    assert (spans["step 3"]["ts"], spans["step 3"]["dur"]) == (0, 3_000_000)
    assert (spans["actor_train"]["ts"], spans["actor_train"]["dur"]) == (500_000, 1_500_000)
    assert spans["actor_train"]["args"] == {"step": 3}


def test_a_trace_tells_when_it_begins_and_was_written(tmp_path: Path):
    trace = Trace()
    trace.add(0, Span("a", "nodes", 1000.5, 1002.0))
    trace.write(tmp_path / "trace.json")
    other = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert other["start"] == 1000.5
    assert other["end"] > 1002.0


def test_a_trace_is_written_while_spans_are_added(tmp_path: Path):
    trace, path, num_spans = Trace(), tmp_path / "trace.json", 500

    def add() -> None:
        for number in range(num_spans):
            trace.add(number % 7, Span("a", f"lane {number % 50}", number, number + 1.0))
            time.sleep(0)

    adding = threading.Thread(target=add)
    adding.start()
    while adding.is_alive():
        read(trace, path)
    adding.join()
    assert len([event for event in read(trace, path) if event["ph"] == "X"]) == num_spans


def test_every_lane_has_its_own_thread(tmp_path: Path):
    trace = Trace()
    for worker in (0, 1):
        for lane in ("gen", "train"):
            trace.add(worker, Span("x", lane, 0.0, 1.0))
    spans = [e for e in read(trace, tmp_path / "trace.json") if e["ph"] == "X"]
    assert len({(e["pid"], e["tid"]) for e in spans}) == 4
    assert len({e["tid"] for e in spans}) == 4


def test_of_a_long_run_the_last_spans_of_each_lane_are_kept(tmp_path: Path):
    trace = Trace(max_spans=2)
    for step in range(5):
        trace.add(0, Span("actor_train", "nodes", step, step + 0.5, {"step": step}))
    trace.add(0, Span("generate", "engine", 0.0, 5.0))
    kept = [e["args"].get("step") for e in read(trace, tmp_path / "trace.json") if e["ph"] == "X"]
    assert sorted(kept, key=str) == [3, 4, None]


def test_an_empty_trace_is_valid(tmp_path: Path):
    assert read(Trace(), tmp_path / "trace.json") == []


def test_overlapping_spans_take_rows_of_their_own():
    first, inside, across = Span("a", "l", 0, 10), Span("b", "l", 2, 5), Span("c", "l", 4, 12)
    after = Span("d", "l", 12, 13)
    assert nested_rows([after, across, inside, first]) == [[first, inside, after], [across]]


times = st.integers(0, 20)


@given(st.lists(st.tuples(times, times).map(sorted)))
def test_rows_hold_every_span_once_and_nested(pairs: list[list[int]]):
    spans = [Span(str(i), "l", a, b) for i, (a, b) in enumerate(pairs)]
    rows = nested_rows(spans)
    assert sorted(s.name for row in rows for s in row) == sorted(s.name for s in spans)
    for row in rows:
        for i, a in enumerate(row):
            for b in row[i + 1 :]:
                assert b.start >= a.end or (a.start <= b.start and b.end <= a.end)
