"""Whatever the schedule and the order of events, a run keeps its promises."""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_driver import World
from state_schedules import schedules, synchronous

from hflow.plan.ir import Schedule

SEEDS = st.integers(0, 2**16)
FEW = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
ROWS = {"eval0": 3, "eval1": 5}


@FEW
@given(schedules(), SEEDS, st.sampled_from((0.0, 0.1, 0.3)))
def test_every_run_ends_and_nothing_is_lost(schedule: Schedule, seed: int, refusal: float):
    world = World(schedule, Random(seed), ROWS, refusal, salt=seed)
    assert world.run().reason == "done"
    world.check_end()


@FEW
@given(schedules(), SEEDS, st.integers(0, 20))
def test_an_exhausted_dataset_ends_the_run(schedule: Schedule, seed: int, num_rows: int):
    world = World(schedule, Random(seed), ROWS | {"roll": num_rows}, salt=seed)
    world.run()
    world.check_end()
    batch = schedule.streams[0].batch or 1
    assert len(world.batches["roll"]) <= num_rows // batch


@FEW
@given(schedules(), SEEDS, st.integers(0, 200))
def test_a_stop_ends_the_run_and_starts_nothing(schedule: Schedule, seed: int, stop_after: int):
    world = World(schedule, Random(seed), ROWS, 0.1, stop_after, salt=seed)
    assert world.run().reason in ("stopped", "done")
    world.check_end()


@FEW
@given(schedules(), st.lists(SEEDS, min_size=2, max_size=2), st.sampled_from((0.0, 0.2)))
def test_synchronous_batches_do_not_depend_on_the_order_of_events(
    schedule: Schedule, seeds: list[int], refusal: float
):
    worlds = [World(synchronous(schedule), Random(seed), ROWS, refusal) for seed in seeds]
    for world in worlds:
        world.run()
        world.check_end()
    if worlds[0].trained.replicas and worlds[0]._changes(worlds[0].trained.models):
        assert worlds[0].batches["roll"] == worlds[1].batches["roll"]
