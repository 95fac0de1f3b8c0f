"""Placement of groups on engines, and moves to less loaded engines."""

import asyncio
from types import SimpleNamespace
from unittest.mock import Mock

import plan_graphs as graphs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan_traffic_estimate import planned

from hflow.data_plane.group_placement import GroupPlacer
from hflow.runtime.execution.engine_control import EngineControl, Rebalancer
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.records.step_metrics import StepMetrics
from hflow.types.engine import SleepLevel
from hflow.workers.interface import GroupTask, WeightsLoaded

STREAM, SIZE, NUM_ENGINES = "actor_gen", 3, 4
PLAN, _ = planned(graphs.grpo(group=SIZE), "cpu-1x4", batch=4)


@given(st.lists(st.integers(0, SIZE), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_groups_move_one_by_one_to_the_least_loaded_engine(finished, rng):
    placer = GroupPlacer(PLAN)
    load, home = dict.fromkeys(range(NUM_ENGINES), 0), {}
    for group, num in enumerate(finished):
        home[group] = placer.place(STREAM, group, SIZE)
        for _ in range(num):
            placer.finished(STREAM, group)
        load[home[group]] += SIZE - num
    movable = [group for group, num in enumerate(finished) if num == 0]
    rng.shuffle(movable)
    expected = {}
    for group in movable:
        least = min(load, key=lambda head: (load[head], head))
        if load[home[group]] - load[least] >= 2 * SIZE:
            expected[group] = least
            load[home[group]] -= SIZE
            load[least] += SIZE
    assert placer.rebalance_moves(STREAM, movable) == expected


@given(st.lists(st.sampled_from(("finish", "refuse")), min_size=2 * SIZE, max_size=2 * SIZE))
def test_groups_are_forgotten_when_all_samples_have_ended(order):
    """Whatever is refused before or after it has finished."""
    placer = GroupPlacer(PLAN)
    placer.place(STREAM, 0, SIZE)
    left = {"finish": SIZE, "refuse": SIZE}
    for what in (*order, *["finish"] * SIZE, *["refuse"] * SIZE):
        if left[what]:
            left[what] -= 1
            placer.finished(STREAM, 0) if what == "finish" else placer.refused(STREAM, 0, 1)
            if any(left.values()):
                assert placer.home(STREAM, 0) in range(NUM_ENGINES)
    with pytest.raises(KeyError):
        placer.home(STREAM, 0)


def test_a_bound_group_is_forgotten_when_its_refused_members_have_left_their_engine():
    placer = GroupPlacer(PLAN)
    placer.place(STREAM, 0, SIZE)
    placer.refused(STREAM, 0, 1)
    for _ in range(SIZE - 1):
        placer.finished(STREAM, 0)
    placer.bound(STREAM, [0])
    assert placer.home(STREAM, 0) in range(NUM_ENGINES)
    placer.finished(STREAM, 0)
    with pytest.raises(KeyError):
        placer.home(STREAM, 0)


class RecordingWorkers:
    """Workers with two busy engines; they record what they receive."""

    def __init__(self) -> None:
        self.received: list[str] = []

    async def publish(self, replica, version):
        self.received.append(f"publish {version}")
        return ()

    async def sleep(self, replica, level):
        self.received.append(f"sleep {level.name}")

    async def detach_groups(self, worker, stream, groups):
        self.received.append(f"detach {groups} from {worker}")
        return [GroupTask(stream, g, g, tuple(range(g * SIZE, (g + 1) * SIZE))) for g in groups]

    async def open_groups(self, worker, tasks):
        self.received.append(f"open {[task.group for task in tasks]} on {worker}")

    async def wake(self, replica, version):
        self.received.append(f"wake {version}")
        return WeightsLoaded()


def test_a_conversation_leaves_the_engine_with_its_prefix_only_while_that_sleeps():
    """Between `Wake` and `Sleep` nothing moves, however uneven the load is: the prefixes would be lost."""
    plan, _ = planned(graphs.grpo(group=SIZE), "cpu-1x2", batch=4)
    (replica,) = [replica for replica in plan.replicas if replica.role == "gen"]
    placer, workers = GroupPlacer(plan), RecordingWorkers()
    homes = {group: placer.place(STREAM, group, SIZE) for group in range(8)}
    assert sorted(homes.values()) == [0] * 4 + [1] * 4
    for group in (group for group, home in homes.items() if home == 1):
        for _ in range(SIZE):
            placer.finished(STREAM, group)
    left = [group for group, home in homes.items() if home == 0]
    state = SimpleNamespace(
        movable_groups=lambda stream: left if stream == STREAM else [],
        members_of=lambda stream, group: set(range(group * SIZE, (group + 1) * SIZE)),
    )
    run = RunContext(plan, workers, Mock(), Mock(), Mock(), 0, StepMetrics(plan), placer)
    control = EngineControl(run, Rebalancer(run, state))

    async def sync() -> None:
        await control.publish(replica.name, 1)
        assert {placer.home(STREAM, group) for group in left} == {0}
        await control.sleep(replica.name, SleepLevel.PAUSE)
        assert sorted(placer.home(STREAM, group) for group in left) == [0, 0, 1, 1]
        await control.wake(replica.name, 1)

    asyncio.run(sync())
    moved = left[:1:-1]
    assert workers.received == [
        "publish 1",
        "sleep PAUSE",
        f"detach {moved} from 0",
        f"open {moved} on 1",
        "wake 1",
    ]
