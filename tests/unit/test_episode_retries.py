"""A failed episode is retried from its journal: no token is generated twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import worker_kit as kit

from hflow.types import Engine, Trajectory
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import Failed, SampleReady, WorkerEvent, WorkerSetup

GEN = "actor_gen"
FIELDS = ("input_ids", "behav_logprobs", "versions", "completion")


@pytest.fixture(scope="module")
def setup() -> WorkerSetup:
    return kit.setup_of("cluster=cpu-1x1")


_tries: Counter[float] = Counter()
_num_failing = 0


async def service(key: float) -> str:
    _tries[key] += 1
    if _tries[key] <= _num_failing:
        raise ConnectionError("try again later")
    return "3"


async def asking(engine: Engine, prompt: str) -> Trajectory:
    talk = await engine.complete(prompt)
    answer = await engine.call(service, key=engine.random())
    return await engine.complete(talk.add("tool", answer))


async def whimsical(engine: Engine, prompt: str) -> Trajectory:
    """Generate with other limits in the second attempt."""
    key = engine.random()
    _tries[key] += 1
    talk = await engine.complete(prompt, max_tokens=2 + (_tries[key] == 2))
    if _tries[key] == 1:
        raise ConnectionError("try again later")
    return talk


async def played(workers: InprocWorkers) -> tuple[list[WorkerEvent], list[list[Any]], int]:
    """Return the events of four samples, their fields, and the number of tokens generated for them."""
    await workers.open_groups(0, kit.group_tasks(GEN, range(2)))
    await workers.wake("actor@gen", 0)
    events = await kit.collect(workers, 0, 4)
    is_whole = all(isinstance(event, SampleReady) for event in events)
    fields = [kit.read(workers, GEN, field, range(4)) for field in FIELDS] if is_whole else []
    return list(events), fields, kit.driver_of(workers).stats.num_tokens


def play(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch, num_failing: int, retries: int, body: Any = asking
) -> tuple[list[WorkerEvent], list[list[Any]], int]:
    monkeypatch.setitem(globals(), "_num_failing", num_failing)
    _tries.clear()
    options = {"tool_format": "+=", "retries": retries}
    return kit.with_workers(kit.with_program(setup, GEN, body=body, options=options), played)


def test_no_token_is_generated_twice(setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected, num_expected = play(setup, monkeypatch, 0, 0)
    _, fields, num_drawn = play(setup, monkeypatch, 2, 2)
    assert fields == expected
    assert num_drawn == num_expected
    assert sorted(_tries.values()) == [3, 3, 3, 3], (
        "each episode called the service three times with its own number"
    )


def test_retries_are_limited(setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    events, _, _ = play(setup, monkeypatch, 3, 2)
    assert len(events) == 4
    for event in events:
        assert isinstance(event, Failed)
        assert "try again later" in event.message


def test_an_episode_that_diverges_starts_without_a_journal(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt with the journal fails; the next one starts without it."""
    events, _, _ = play(setup, monkeypatch, 0, 2, whimsical)
    assert all(isinstance(event, SampleReady) for event in events), events
    events, _, _ = play(setup, monkeypatch, 0, 1, whimsical)
    for event in events:
        assert isinstance(event, Failed)
        assert "can only be replayed by the body that wrote it" in event.message
