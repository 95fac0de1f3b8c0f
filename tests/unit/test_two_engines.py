"""Episodes with two engines: samples in both streams, timeouts that run while both engines are awake."""

from __future__ import annotations

from pathlib import Path

import pytest
import worker_kit as kit

from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_setup
from hflow.types import Engine, Trajectory
from hflow.types.engine import SleepLevel
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import Failed, SampleReady, WorkerSetup

GAME = Path(__file__).parents[1] / "graphs" / "good" / "game.py"
TINY = [f"+model@models.{name}=tiny-qwen2" for name in ("alice", "bob")]
TINY += ["+data@data.train=addition", "cluster=cpu-1x1", "nodes.game.max_tokens=3"]
FIRST = range(8)


@pytest.fixture(scope="module")
def setup() -> WorkerSetup:
    return make_setup(compile_recipe(GAME, TINY))


def test_a_sample_is_in_both_streams(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        await workers.open_groups(0, kit.group_tasks("alice_play", range(1), 8))
        await workers.wake("alice@gen", 4)
        await workers.wake("bob@gen", 2)
        events = {
            event.sample: event
            for event in await kit.collect(workers, 0, 8)
            if isinstance(event, SampleReady)
        }
        assert sorted(events) == list(FIRST)
        plays = {s: kit.read(workers, s, "input_ids", FIRST) for s in ("alice_play", "bob_play")}
        versions = {s: kit.read(workers, s, "versions", FIRST) for s in plays}
        for sample, event in events.items():
            assert event.stream == "alice_play"
            assert event.length == sum(len(ids[sample]) for ids in plays.values())
            assert (event.oldest, event.newest) == (2, 4)
        assert {v for row in versions["alice_play"] for v in row} == {-1, 4}
        assert {v for row in versions["bob_play"] for v in row} == {-1, 2}
        winners = [kit.read(workers, stream, "winner", FIRST) for stream in plays]
        assert winners[0] == winners[1]
        await workers.release(0, FIRST, "alice_play", None)
        assert not any(workers._worker._store.has(stream, "input_ids", 0) for stream in plays)

    kit.with_workers(setup, work)


async def failing(alice: Engine, bob: Engine, prompt: str) -> tuple[Trajectory, Trajectory, float]:
    raise KeyError("by request")


def test_a_failure_names_the_node(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        await workers.open_groups(0, kit.group_tasks("alice_play", range(1), 8))
        events = await kit.collect(workers, 0, 8)
        assert {event.node for event in events if isinstance(event, Failed)} == {"game"}
        assert len(events) == 8

    kit.with_workers(kit.with_program(setup, "game", body=failing), work)


def test_timeouts_run_while_both_engines_are_awake(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> list[bool]:
        episodes = workers._worker._episodes
        seen = []
        for act, replica in (
            *((workers.wake, "alice@gen"), (workers.wake, "bob@gen")),
            *((workers.sleep, "alice@gen"), (workers.wake, "alice@gen")),
        ):
            await act(replica, 0 if act == workers.wake else SleepLevel.KEEP_WEIGHTS)  # type: ignore[operator]
            episodes.journals("game", ())  # comes back when the episodes' loop has done what it was told
            seen.append(episodes._runners["game"].clock._is_running)
        return seen

    assert kit.with_workers(setup, work) == [False, True, False, True]
