"""Unfinished episodes move from one worker to another as journals."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import worker_kit as kit

from hflow.episodes.journal import Journal, JournalEntry
from hflow.types import Engine, EpisodeState, Trajectory
from hflow.types.engine import SleepLevel
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import Failed, GroupTask, SampleReady, SavedJournals, WorkerSetup

GEN = "actor_gen"
FIELDS = ("input_ids", "loss_mask", "behav_logprobs", "versions", "completion")


@pytest.fixture(scope="module", params=["function", "environment"])
def setup(request: pytest.FixtureRequest) -> WorkerSetup:
    body = hesitant if request.param == "function" else exploring
    setup = kit.setup_of("cluster=cpu-1x1")
    return kit.with_program(setup, GEN, body=body, options={"tool_format": "+="})


_open = True
_consulted: list[str] = []


async def oracle(question: str) -> str:
    _consulted.append(question)
    while not _open:
        await asyncio.sleep(0.01)
    return "3"


async def hesitant(engine: Engine, prompt: str) -> Trajectory:
    talk = await engine.complete(prompt)
    return await engine.complete(talk.add("tool", await engine.call(oracle, question=prompt)))


class Room:
    """An environment whose answers depend on the calls before."""

    def __init__(self, num_visits: int) -> None:
        self._num_visits = num_visits

    def enter(self) -> int:
        self._num_visits += 1
        return self._num_visits

    async def ask(self, question: str) -> str:
        await oracle(question)
        return str(self.enter())


async def exploring(engine: Engine, prompt: str) -> Trajectory:
    room = await engine.environment(Room, num_visits=2)
    talk = await engine.complete(prompt, max_tokens=await engine.call(room.enter))
    return await engine.complete(talk.add("tool", await engine.call(room.ask, question=prompt)))


def tasks(workers: InprocWorkers) -> list[tuple[GroupTask, Any]]:
    rows = workers._worker._rows
    return [(task, rows.row(task.stream, task.row)) for task in kit.group_tasks(GEN, range(2))]


async def started(workers: InprocWorkers, journals: dict[int, Journal]) -> None:
    """Open groups with journals."""
    sink = workers._worker._mailboxes[0].put
    workers._worker._episodes.open_groups(tasks(workers), sink, journals)
    await workers.wake("actor@gen", 0)


def read(workers: InprocWorkers) -> list[list[Any]]:
    return [kit.read(workers, GEN, field, range(4)) for field in FIELDS]


async def finished(workers: InprocWorkers, journals: dict[int, Journal]) -> tuple[list[list[Any]], int]:
    """Return the samples' fields, and the number of tokens generated for them."""
    await started(workers, journals)
    events = await kit.collect(workers, 0, 4)
    assert all(isinstance(event, SampleReady) for event in events), events
    assert workers._worker._episodes.state_counts()[EpisodeState.TERMINATED] == 4
    return read(workers), kit.driver_of(workers).stats.num_tokens


async def left(workers: InprocWorkers) -> None:
    """Leave episodes that all wait for the oracle."""
    _consulted.clear()
    await started(workers, {})
    while len(_consulted) < 4:
        await asyncio.sleep(0.01)
    await workers.sleep("actor@gen", SleepLevel.KEEP_WEIGHTS)


def test_an_episode_that_continues_from_a_file_makes_the_same_sample(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected, num_expected = kit.with_workers(setup, lambda workers: finished(workers, {}))
    monkeypatch.setitem(globals(), "_open", False)
    num_journaled = 0

    async def save(workers: InprocWorkers) -> None:
        nonlocal num_journaled
        await left(workers)
        journals = workers._worker._episodes.journals(GEN, range(5))
        assert journals.keys() == set(range(4))
        entries = [entry for journal in journals.values() for entry in journal.entries]
        num_journaled = sum(len(entry.outcome.ids) for entry in entries if entry.kind == "complete")
        await workers.save_samples(0, str(tmp_path), {}, {GEN: range(5), "view": (0,)})
        saved = await workers.finish_samples(0, str(tmp_path))
        assert saved.files.keys() == {"worker-0.json", "worker-0.safetensors"}

    async def resume(workers: InprocWorkers) -> tuple[list[list[Any]], int]:
        given = SavedJournals(str(tmp_path), dict.fromkeys(range(4), "worker-0"))
        groups = [dataclasses.replace(task, journals=given) for task in kit.group_tasks(GEN, range(2))]
        await workers.open_groups(0, groups)
        await workers.wake("actor@gen", 0)
        await kit.collect(workers, 0, 4)
        return read(workers), kit.driver_of(workers).stats.num_tokens

    kit.with_workers(setup, save)
    monkeypatch.setitem(globals(), "_open", True)
    _consulted.clear()
    fields, num_drawn = kit.with_workers(setup, resume)
    assert fields == expected
    assert num_drawn == num_expected - num_journaled
    assert len(_consulted) == 4  # the oracle's answer was not recorded, so it is called again


def test_detached_groups_continue_on_another_worker(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with a finished member is not detached."""
    expected, num_expected = kit.with_workers(setup, lambda workers: finished(workers, {}))

    async def work(workers: InprocWorkers) -> tuple[list[list[Any]], int]:
        await left(workers)
        assert await workers.detach_groups(0, GEN, [7]) == []
        given = await workers.detach_groups(0, GEN, [0, 1])
        assert [(task.group, task.samples) for task in given] == [(0, (0, 1)), (1, (2, 3))]
        assert await workers.detach_groups(0, GEN, [0, 1]) == []
        monkeypatch.setitem(globals(), "_open", True)
        await workers.open_groups(0, given)
        await workers.wake("actor@gen", 1)
        events = await kit.collect(workers, 0, 4)
        assert {(event.oldest, event.newest) for event in events} == {(0, 1)}
        return read(workers), kit.driver_of(workers).stats.num_tokens

    monkeypatch.setitem(globals(), "_open", False)
    fields, num_drawn = kit.with_workers(setup, work)
    versions = FIELDS.index("versions")
    assert [f for i, f in enumerate(fields) if i != versions] == [
        f for i, f in enumerate(expected) if i != versions
    ]
    assert num_drawn == num_expected


def test_a_journal_of_another_body_refuses_its_sample(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> list[Any]:
        await started(workers, {1: Journal((JournalEntry("time", "actor", {}),))})
        return await kit.collect(workers, 0, 4)

    events = kit.with_workers(setup, work)
    (refused,) = [event for event in events if isinstance(event, Failed)]
    assert (refused.key, refused.reason) == (1, "failed")
    assert "effect 0 of the replayed episode is " in refused.message
    assert "but the journal has time" in refused.message


def test_polls_report_the_states_of_episodes(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> dict[str, int]:
        await workers.open_groups(0, kit.group_tasks(GEN, range(2)))
        await workers.wake("actor@gen", 0)
        seen: dict[str, int] = {}
        num_events = 0
        while num_events < 4:
            report = await workers.poll(0)
            num_events += len(report.events)
            seen = dict(report.episodes)
        return seen

    seen = kit.with_workers(setup, work)
    assert seen == {state.value: 4 if state is EpisodeState.TERMINATED else 0 for state in EpisodeState}


async def offering(engine: Engine, prompt: str) -> Trajectory:
    talk = await engine.complete(prompt, tools=[failing])
    await engine.call(failing, question="")
    return talk


def failing(question: str) -> str:
    raise ConnectionError("by request")


def test_tool_calls_are_counted_as_metrics_of_the_sample(setup: WorkerSetup) -> None:
    changed = kit.with_program(setup, GEN, body=offering)

    async def work(workers: InprocWorkers) -> dict[str, tuple[float, int]]:
        await workers.open_groups(0, kit.group_tasks(GEN, range(2)))
        await workers.wake("actor@gen", 0)
        await kit.collect(workers, 0, 4)
        return await workers.summarize(0, GEN, range(4))

    sums = kit.with_workers(changed, work)
    assert sums[f"{GEN}/{GEN}.tool_calls"] == sums[f"{GEN}/{GEN}.tool_errors"] == (4.0, 4)
    assert sums[f"{GEN}/{GEN}.malformed_calls"][1] == 4
