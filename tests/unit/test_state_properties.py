"""For every schedule and order of events, a run keeps its guarantees."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from random import Random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_driver import EventsExhaustedError, World
from state_schedules import schedules, synchronous
from state_script import changed

from hflow.planner.plan.rows import Schedule
from hflow.runtime import events as ev

SEEDS = st.integers(0, 2**16)
FEW = settings(max_examples=60, suppress_health_check=list(HealthCheck))
ROWS = {"eval0": 3, "eval1": 5}


@FEW
@given(schedules(), SEEDS, st.sampled_from((0.0, 0.05, 0.2)), st.sampled_from((0.0, 0.1, 0.5)))
def test_every_run_ends_and_nothing_is_lost(schedule: Schedule, seed: int, refusal: float, stall: float):
    """Unless more is refused, in total or in a row, than the run may lose, and then it says so."""
    world = World(schedule, Random(seed), ROWS, refusal, salt=seed, stall=stall)
    finish = world.run()
    if finish.error:
        assert refusal > 0
        assert "were refused" in finish.reason
    else:
        assert finish.reason == "done"
        world.check_end()


@FEW
@given(schedules(), SEEDS, st.sampled_from((0.0, 0.05)), st.sampled_from((0.02, 0.1)), st.booleans())
def test_a_run_ends_and_nothing_is_lost_when_engines_are(
    schedule: Schedule, seed: int, refusal: float, losses: float, is_stopped: bool
):
    """An engine that generates on devices of its own comes back without weights, at any moment."""
    stop_after = seed % 150 if is_stopped else None
    world = World(schedule, Random(seed), ROWS, refusal, stop_after, salt=seed, losses=losses)
    if not world.run().error:
        world.check_end()


@FEW
@given(schedules(), SEEDS, st.integers(0, 20))
def test_an_exhausted_dataset_ends_the_run(schedule: Schedule, seed: int, num_rows: int):
    """Without refusals, every full batch of rows is trained on, and no other."""
    world = World(schedule, Random(seed), ROWS | {"roll": num_rows}, salt=seed)
    finish = world.run()
    world.check_end()
    if world.ends_of(ev.Refuse) == 0:
        batches = min(schedule.num_steps, num_rows // (schedule.streams[0].batch or 1))
        assert len(world.batches["roll"]) == batches
        assert finish.reason == ("done" if batches == schedule.num_steps else "dataset exhausted")


@FEW
@given(schedules(), SEEDS, st.integers(0, 200))
def test_a_stop_ends_the_run_and_starts_nothing(schedule: Schedule, seed: int, stop_after: int):
    world = World(schedule, Random(seed), ROWS, 0.05, stop_after, salt=seed)
    if not world.run().error:
        assert world.finish in (ev.Finish("stopped"), ev.Finish("done"))
        world.check_end()


@FEW
@given(schedules(), st.tuples(SEEDS, SEEDS), st.sampled_from((0.0, 0.1)))
def test_synchronous_batches_do_not_depend_on_the_order_of_events(
    schedule: Schedule, seeds: tuple[int, int], refusal: float
):
    worlds = [World(synchronous(schedule), Random(seed), ROWS, refusal) for seed in seeds]
    finishes = [world.run() for world in worlds]
    if not any(finish.error for finish in finishes):
        assert worlds[0].batches["roll"] == worlds[1].batches["roll"]


@FEW
@given(schedules(saves=True), SEEDS, st.integers(0, 150), st.booleans(), st.sampled_from((0.0, 0.1)))
def test_a_run_that_ends_anywhere_goes_on_from_its_checkpoint(
    schedule: Schedule, seed: int, end_after: int, is_stopped: bool, refusal: float
):
    """Stopped or killed: no sample ends twice, and at the end each has ended."""
    more: dict[str, Any] = {"refusal": refusal, "salt": seed, "checkpoints": 0.1}
    first = World(schedule, Random(seed), ROWS, stop_after=end_after if is_stopped else None, **more)
    with nullcontext() if is_stopped else suppress(EventsExhaustedError):
        first.run(20_000 if is_stopped else end_after)
    if is_stopped and first.finish == ev.Finish("stopped"):
        assert first.saved is not None or not first.steps_done
    second = World(schedule, Random(seed + 1), ROWS, saved=first.saved, **more)
    if not second.run().error:
        second.check_end()


@FEW
@given(schedules(saves=True), SEEDS, st.integers(0, 150), st.booleans(), st.booleans())
def test_a_lower_bound_on_staleness_holds_from_a_resume_on(
    schedule: Schedule, seed: int, end_after: int, is_short: bool, age_rule: bool
):
    """Samples of the checkpoint that would train above it are dropped, with the age rule and without."""
    first = World(changed(schedule, max_staleness=3), Random(seed), ROWS, salt=seed, checkpoints=0.1)
    with suppress(EventsExhaustedError):
        first.run(end_after)
    queue = schedule.streams[0].batch if is_short else None
    lower = changed(synchronous(schedule), queue=queue, age_rule=age_rule)
    second = World(lower, Random(seed + 1), ROWS, salt=seed, saved=first.saved)
    second.run()
    second.check_end()


@FEW
@given(schedules(saves=True), SEEDS, st.integers(0, 150), st.sampled_from((0.0, 0.1)))
def test_a_synchronous_run_that_was_killed_forms_the_same_batches(
    schedule: Schedule, seed: int, killed_after: int, refusal: float
):
    schedule = synchronous(schedule)
    undisturbed = World(schedule, Random(seed), ROWS, refusal)
    killed = World(schedule, Random(seed), ROWS, refusal, checkpoints=0.1)
    with suppress(EventsExhaustedError):
        killed.run(killed_after)
    resumed = World(schedule, Random(seed + 1), ROWS, refusal, saved=killed.saved)
    if not undisturbed.run().error and not resumed.run().error:
        for stream in streams_in_step(schedule):
            assert resumed.batches[stream] == undisturbed.batches[stream]


def streams_in_step(schedule: Schedule) -> list[str]:
    """The trained stream, and evaluations that do not depend on timing.

    Training waits for those on the trained stream's engines. On engines of its own, an evaluation is skipped
    when training is faster, in any run.
    """
    trained = schedule.streams[0]
    return [s.name for s in schedule.streams if set(s.replicas) <= set(trained.replicas)]
