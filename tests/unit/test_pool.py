"""The pool of body processes: values, failures, timeouts, crashes, retries, concurrency."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pool_bodies
import psutil
import pytest
from pool_bodies import (
    Counted,
    blocking,
    die_on_five,
    dies_on_four,
    double,
    draw,
    fail_on_odd,
    hang_on_seven,
    killed_twice,
    loaded_modules,
    num_together,
    own_pid,
    print_and_fail,
    sleepy,
    slow_on_hundreds,
    slow_on_twentieths,
    third_time,
    two_seconds,
    unpicklable,
)

from hflow.base.errors import RunError
from hflow.types.body_line import BodyLine
from hflow.workers.bodies.pool import Pool, PoolBody
from hflow.workers.bodies.pool_child import JobResult
from hflow.workers.interface import BodyRetry


class Bench:
    """A pool with one body, named `body`, and its results."""

    def __init__(self, body: Callable[..., Any], num_processes: int, **options: Any) -> None:
        self._results: queue.SimpleQueue[Sequence[JobResult] | BaseException] = queue.SimpleQueue()
        self.retries: queue.SimpleQueue[BodyRetry] = queue.SimpleQueue()
        spec = {name: value for name, value in options.items() if name != "seed"}
        bodies = {"body": PoolBody(body, **({"backoff": 0.01} | spec))}
        put = self._results.put
        self.lines: list[BodyLine] = []
        seed = options.pop("seed", 0)
        self.pool = Pool(bodies, num_processes, seed, put, self.retries.put, put, self.lines.extend)

    def run(self, calls: dict[int, dict[str, Any]]) -> dict[int, JobResult]:
        self.pool.submit("body", calls)
        return self.wait(len(calls))

    def wait(self, count: int) -> dict[int, JobResult]:
        ended: dict[int, JobResult] = {}
        while len(ended) < count:
            found = self._results.get(timeout=60)
            if isinstance(found, BaseException):
                raise found
            for result in found:
                assert result.key not in ended, "a job was reported twice"
                ended[result.key] = result
        assert self._results.empty()
        return ended


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(body: Callable[..., Any], num_processes: int = 1, **options: Any) -> Bench:
        made.append(Bench(body, num_processes, **options))
        return made[-1]

    yield make
    for one in made:
        one.pool.close()


def numbers(count: int) -> dict[int, dict[str, Any]]:
    return {key: {"x": key} for key in range(count)}


def test_values_of_many_jobs(bench: Callable[..., Bench]) -> None:
    ended = bench(double, num_processes=2).run(numbers(300))
    assert {key: result.value for key, result in ended.items()} == {k: 2 * k for k in range(300)}


def test_children_import_only_what_bodies_need(bench: Callable[..., Bench]) -> None:
    assert bench(loaded_modules).run(numbers(1))[0].value == []


def test_a_failure_names_the_line_of_the_body(bench: Callable[..., Bench]) -> None:
    ended = bench(fail_on_odd).run(numbers(10))
    assert sorted(key for key, result in ended.items() if result.reason is None) == [0, 2, 4, 6, 8]
    line = fail_on_odd.__code__.co_firstlineno + 2
    assert ended[3].reason == "failed"
    assert ended[3].message == f"ValueError: 3 is odd ({os.path.relpath(pool_bodies.__file__)}:{line})"


def test_only_the_hanging_sample_times_out(bench: Callable[..., Bench]) -> None:
    ended = bench(hang_on_seven, timeout=0.5).run(numbers(20))
    assert [key for key, result in sorted(ended.items()) if result.reason] == [7]
    assert (ended[7].reason, ended[7].message) == ("timeout", "took longer than its timeout of 0.5 s")
    assert ended[8].value == 8


def test_a_node_with_a_setup_has_one_process_that_is_set_up_again_when_it_is_replaced(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    made = bench(Counted(str(tmp_path)), num_processes=2, timeout=0.5)
    (first,) = (int(mark.name) for mark in tmp_path.iterdir())  # before any call
    ended = made.run(numbers(12))
    marks = {int(mark.name) for mark in tmp_path.iterdir()}
    used = {result.value - key for key, result in ended.items() if result.reason is None}
    assert [key for key, result in ended.items() if result.reason] == [7]
    assert first in used
    assert used <= marks
    assert len(marks) == 2


def test_a_setup_that_fails_ends_the_run(tmp_path: Path) -> None:
    problem = r"node 'body': its setup failed: OSError: no index \(.*pool_bodies.py"
    with pytest.raises(RunError, match=problem):
        Bench(Counted(str(tmp_path), "no index"), 1)


def test_only_the_crashing_sample_fails(bench: Callable[..., Bench]) -> None:
    ended = bench(die_on_five, num_processes=2).run(numbers(30))
    assert [key for key, result in sorted(ended.items()) if result.reason] == [5]
    assert (ended[5].reason, ended[5].message) == ("failed", "its process died (exit code 3)")


def test_retries(bench: Callable[..., Bench], tmp_path: Path) -> None:
    calls = {key: {"marks": str(tmp_path), "x": key} for key in range(4)}
    assert {result.value for result in bench(third_time, retries=2).run(calls).values()} == {2}


def test_too_few_retries(bench: Callable[..., Bench], tmp_path: Path) -> None:
    ended = bench(third_time, retries=1).run({0: {"marks": str(tmp_path), "x": 0}})
    assert ended[0].reason == "failed"
    assert ended[0].message.startswith("OSError: not yet")
    assert ended[0].message.endswith("; tried 2 times")
    assert (tmp_path / "0").read_text() == "xx"


def test_a_crash_is_retried_and_counted(bench: Callable[..., Bench]) -> None:
    one = bench(die_on_five, retries=2)
    ended = one.run(numbers(8))
    assert [key for key, result in ended.items() if result.reason] == [5]
    assert ended[5].message == "its process died (exit code 3); tried 3 times"
    waits = [retry.wait for retry in drain(one.retries) if retry.wait]
    assert [0.5 * most <= wait <= most for wait, most in zip(waits, (0.01, 0.02), strict=True)] == [True] * 2


def drain(source: queue.SimpleQueue[BodyRetry]) -> list[BodyRetry]:
    return [source.get() for _ in range(source.qsize())]


def test_a_body_whose_process_is_killed_is_tried_again(bench: Callable[..., Bench], tmp_path: Path) -> None:
    """Once with its neighbours, then alone and, without any option, twice more."""
    one = bench(killed_twice)
    ended = one.run({key: {"marks": str(tmp_path), "x": key} for key in range(3)})
    assert {key: (result.reason, result.value) for key, result in ended.items()} == {
        0: (None, 0),
        1: (None, 3),
        2: (None, 0),
    }
    retries = drain(one.retries)
    assert {retry.message for retry in retries} == {"its process died (exit code -9)"}
    assert [retry.key for retry in retries if retry.wait] == [1, 1]


def test_a_job_is_cancelled_while_it_waits_for_another_attempt(bench: Callable[..., Bench]) -> None:
    one = bench(fail_on_odd, retries=1, backoff=3600)
    one.pool.submit("body", numbers(2))
    assert one.wait(1)[0].value == 0
    assert one.retries.get(timeout=60).key == 1
    one.pool.cancel([("body", 1)])
    assert one.wait(1)[1].message == "was cancelled"


def test_an_unpicklable_value_fails_only_its_own_job(bench: Callable[..., Bench]) -> None:
    ended = bench(unpicklable).run(numbers(3))
    assert [key for key, result in ended.items() if result.reason] == [1]
    assert ended[1].message.endswith("the body returned function")


def test_async_bodies_time_out_one_by_one(bench: Callable[..., Bench]) -> None:
    ended = bench(sleepy, timeout=0.3).run(numbers(40))
    assert [key for key, result in ended.items() if result.reason] == [3]
    assert ended[3].reason == "timeout"


def test_an_async_body_that_blocks_times_out_alone(bench: Callable[..., Bench]) -> None:
    ended = bench(blocking, timeout=0.2).run(numbers(5))
    assert [key for key, result in ended.items() if result.reason] == [2]
    assert ended[2].reason == "timeout"


def test_async_concurrency_is_bounded_and_used(bench: Callable[..., Bench]) -> None:
    ended = bench(num_together, concurrency=3).run(numbers(12))
    assert max(result.value for result in ended.values()) == 3


def test_a_body_whose_module_is_not_importable(bench: Callable[..., Bench], tmp_path: Path) -> None:
    import importlib.util
    import sys

    path = tmp_path / "a_recipe.py"
    path.write_text("FACTOR = 5\n\ndef times(x):\n    return FACTOR * x\n")
    spec = importlib.util.spec_from_file_location("a_recipe_by_path", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        assert bench(module.times).run(numbers(3))[2].value == 10
    finally:
        del sys.modules[spec.name]


def test_a_process_killed_while_idle_is_replaced(bench: Callable[..., Bench]) -> None:
    one = bench(own_pid)
    pid = one.run(numbers(1))[0].value
    os.kill(pid, signal.SIGKILL)
    results = [one.run(numbers(3)) for _ in range(2)]
    assert {result.reason for ended in results for result in ended.values()} == {None}
    assert pid not in {result.value for result in results[-1].values()}


def test_a_process_that_is_stopped_while_idle_is_continued(bench: Callable[..., Bench]) -> None:
    """A stopped process of a body, or the server that forks them, would never answer, nor end."""
    for num_processes in (1, 2):
        one = bench(own_pid, num_processes)
        pids = {result.value for result in one.run(numbers(20)).values()}
        server = psutil.Process(min(pids)).ppid()
        for pid in (*pids, server):
            os.kill(pid, signal.SIGSTOP)
        results = one.run(numbers(20))
        assert {result.reason for result in results.values()} == {None}
        os.kill(server, signal.SIGSTOP)
        one.pool.close()


def test_closing_twice_while_a_body_hangs() -> None:
    one = Bench(hang_on_seven, 1)
    one.pool.submit("body", {7: {"x": 7}})
    one.pool.close()
    one.pool.close()


def test_slow_jobs_do_not_delay_others(bench: Callable[..., Bench]) -> None:
    """One process, three jobs that never end: all others end, and these end when they are cancelled."""
    one = bench(slow_on_hundreds)
    one.pool.submit("body", numbers(300))
    ended = one.wait(297)
    assert {key for key in range(300) if key not in ended} == {0, 100, 200}
    assert {result.reason for result in ended.values()} == {None}
    one.pool.cancel([("body", key) for key in (0, 100, 200, 299)])
    ended = one.wait(3)
    assert {(key, result.reason) for key, result in ended.items()} == {(k, "failed") for k in (0, 100, 200)}
    assert one.run(numbers(2) | {1: {"x": 7}, 0: {"x": 8}})[1].value == 7


def test_more_slow_jobs_than_there_are_places_do_not_delay_others(bench: Callable[..., Bench]) -> None:
    """24 jobs never end, and 16 may run at once; then these are cancelled, wherever they wait or run."""
    one = bench(slow_on_twentieths)
    one.pool.submit("body", numbers(480))
    ended = one.wait(480 - 24)
    assert {key for key in range(480) if key not in ended} == set(range(0, 480, 20))
    one.pool.cancel([("body", key) for key in range(0, 480, 20)])
    cancelled = one.wait(24)
    assert {result.reason for result in cancelled.values()} == {"failed"}
    assert one.run({1: {"x": 7}})[1].value == 7


def test_a_body_that_is_always_slow_is_not_run_again_and_again(
    bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """Each job runs once, except the few by which the pool learns that they are slow."""
    results = bench(two_seconds).run({key: {"marks": str(tmp_path), "x": key} for key in range(24)})
    assert {key: result.value for key, result in results.items()} == {key: key for key in range(24)}
    assert sum(len(path.read_text()) for path in tmp_path.iterdir()) < 24 + 8


def test_a_cancelled_job_is_not_retried(bench: Callable[..., Bench]) -> None:
    for body in (slow_on_hundreds, sleepy):
        one = bench(body, retries=5, timeout=60)
        one.pool.submit("body", {3: {"x": 3 if body is sleepy else 0}})
        one.pool.cancel([("body", 3)])
        assert one.wait(1)[3].message == "was cancelled"


def test_what_a_body_draws_depends_on_its_sample_and_the_seed_only(bench: Callable[..., Bench]) -> None:
    drawn = {
        name: [result.value for _, result in sorted(bench(draw, **options).run(calls).items())]
        for name, calls, options in (
            ("one", numbers(8), {}),
            ("two", dict(reversed(numbers(8).items())), {"num_processes": 2}),
            ("other", numbers(8), {"seed": 1}),
        )
    }
    assert drawn["one"] == drawn["two"]
    assert len({*map(tuple, drawn["one"]), *map(tuple, drawn["other"])}) == 16


def test_only_the_async_body_that_ends_its_process_fails(bench: Callable[..., Bench]) -> None:
    ended = bench(dies_on_four, retries=1).run(numbers(9))
    assert [key for key, result in ended.items() if result.reason] == [4]
    assert ended[4].message.startswith("its process died")


def test_what_a_body_printed_arrives_before_its_result(bench: Callable[..., Bench]) -> None:
    one = bench(print_and_fail)
    assert one.run({7: {"x": 7}})[7].reason == "failed"
    assert [line.key for line in one.lines] == [7] * len(one.lines)
    printed = [line.text for line in one.lines if not line.is_traceback]
    assert printed == ["é" * 3000, "begun 7", "not ended"]
    first, *others = [line.text for line in one.lines if line.is_traceback]
    assert first.startswith("Traceback")
    assert "print_and_fail" in others[0]
    assert others[-2:] == ["ValueError: two", "lines"]


def test_what_a_body_printed_arrives_though_its_process_died(bench: Callable[..., Bench]) -> None:
    one = bench(print_and_fail)
    assert one.run({0: {"x": 0}})[0].reason == "failed"
    assert [line.text for line in one.lines][:2] == ["é" * 3000, "begun 0"]
