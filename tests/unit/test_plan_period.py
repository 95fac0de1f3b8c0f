"""The steady state of a schedule: periods against the simulated run and by hand, and what people read."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from period_schedules import Timed, settled_period, timed_schedules
from state_script import ENGINE, arriving, batch, encoded, generated, group, grpo, sample, schedule

from hflow.planner.forecast.period import steady_period
from hflow.planner.plan.forecast import Period, Slot
from hflow.planner.plan.rows import PUBLISH_PREFIX, Schedule, ScheduledStream
from hflow.runtime.simulation.simulate import simulate

SLOW = {
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),  # a run that disagrees is long: no shrinking
}
PUBLISH = PUBLISH_PREFIX + ENGINE
SECONDS = {"values": 3.0, "advantage": 1.0, "train": 5.0}


def period(what: Schedule, seconds: dict[str, float], **more: dict[tuple[str, str], str]) -> Period:
    found = steady_period(what, seconds, **more)
    assert found is not None
    return found


def rows(found: Period) -> list[tuple[str, float, str, int]]:
    return [(row.node, row.seconds, row.why, row.lag) for row in found.cycle]


def chain(*groups: str, **more: int) -> Schedule:
    """values -> advantage -> train, each on the group that is named."""
    nodes = [
        batch("values", groups[0], reads=("critic",)),
        batch("advantage", groups[1], "values"),
        batch("train", groups[2], "advantage", writes=("actor",)),
    ]
    return schedule([encoded()], nodes, **{"num_steps": 96, **more})


def rollout(*, shared: bool, **more: int) -> Schedule:
    """Generation and training; two samples a batch, and no more in flight."""
    nodes = [batch("train", "g", writes=("actor",))]
    return schedule(
        [generated(size=1)], nodes, shared="g" if shared else "", num_steps=96, max_concurrent=2, **more
    )


def scored(**more: int) -> Schedule:
    """A model in front of a `keep`, with devices of its own."""
    nodes = [
        arriving("rm", "m", "gen"),
        group("keeps", "rm", keep=True),
        batch("train", "g", writes=("actor",)),
    ]
    return schedule([generated(size=1)], nodes, num_steps=96, max_concurrent=2, **more)


@pytest.mark.parametrize(
    ("eta", "rm", "seconds"), [(0, 1.0, 4 + 2 * 1 + 5), (2, 1.0, 5.0), (2, 4.0, 2 * 4.0)], ids=str
)
def test_a_streaming_inference_node(eta: int, rm: float, seconds: float):
    """Two groups a step go through it; with staleness, while others are drawn and trained."""
    what, spent = scored(max_staleness=eta), {"gen": 4.0, "rm": rm, "train": 5.0}
    found = period(what, spent)
    assert found.seconds == seconds
    assert simulate(what, spent).period() == pytest.approx(seconds)
    assert dict(found.idle)["m"] == pytest.approx(1 - 2 * rm / seconds)


# ------------------------------------------------------------------- against the state machine
def check(timed: Timed) -> None:
    found = steady_period(timed.schedule, timed.seconds)
    if found is None:
        return
    assert settled_period(timed, found.seconds) == pytest.approx(found.seconds, rel=1e-6)
    spent, crossed = sum(row.seconds for row in found.cycle), sum(row.lag for row in found.cycle)
    assert spent == pytest.approx(found.seconds * crossed)
    assert all(row.lag >= 0 for row in found.cycle)


@settings(max_examples=50, **SLOW)
@given(timed_schedules("written"))
def test_the_period_of_batch_nodes_is_that_of_the_run(timed: Timed):
    check(timed)


@settings(max_examples=50, **SLOW)
@given(timed_schedules("actor", "game", "teacher"))
def test_the_period_of_synchronous_generation_is_that_of_the_run(timed: Timed):
    check(timed)


def scored_game() -> Schedule:
    """Two engines that each share a group with a writer; weights every three steps; two scores a sample."""
    stream = ScheduledStream("gen", "gen", 1, 2, ("actor@gen", "critic@gen"), ("actor", "critic"))
    nodes = [
        sample("score", "gen"),
        sample("check", "score"),
        batch("actor_train", "a", writes=("actor",), every=2, after=1),
        batch("critic_train", "c", writes=("critic",), every=3, after=3),
    ]
    what = schedule([stream], nodes, num_steps=96, max_concurrent=2, sync_every=3)
    return replace(what, shared=(("a", ("actor@gen",)), ("c", ("critic@gen",))), publishers=())


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("gen", "score", "is_exact"),
    [
        (2.0**-6, 0.0, True),
        (3.0, 2.0, False),
        (0.0, 0.0, False),  # the next batch is drawn within the moment in which this one is scored
        (3.0, 0.0, True),
        (3.0, 6.0, False),
    ],
)
def test_generating_while_samples_are_scored_is_only_faster(gen: float, score: float, is_exact: bool):
    """The period is exact where scores take no time and samples some. Else the run is faster, but no faster
    than with engines on devices of their own, which wait for no turns."""
    what = scored_game()
    engines = {"actor@gen": 7.0, "critic@gen": 3.0}
    seconds = {**engines, "gen": gen, "score": score, "check": score, "actor_train": 8.0, "critic_train": 7.0}
    found = period(what, seconds).seconds
    run = settled_period(Timed(what, seconds), found)
    if is_exact:
        assert run == pytest.approx(found)
    else:
        own_devices = period(replace(what, shared=()), seconds).seconds
        assert own_devices * (1 - 1e-9) <= run < found


@pytest.mark.first(5)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("max_staleness", "sync_every"),
    [(1, 1), (2, 2), (0, 1), (2, 1), (3, 1), (0, 2), (1, 2), (3, 2), (0, 3), (1, 3), (2, 3), (3, 3)],
)
def test_the_period_of_stale_generation_is_that_of_the_run(shared: bool, max_staleness: int, sync_every: int):
    """Except for eta = 1 with a separate engine that loads slowly: it loads in the middle of a batch."""
    what = rollout(shared=shared, max_staleness=max_staleness, sync_every=sync_every)
    for gen, train, load in product((1.0, 4.0, 7.0), (2.0, 5.0), (0.0, 0.5, 3.0)):
        seconds = {"gen": gen, "train": train, ENGINE: load, PUBLISH: 0.25 if load else 0.0}
        found, run = period(what, seconds).seconds, simulate(what, seconds).period()
        if max_staleness != 1 or shared or load < 3:
            assert run == pytest.approx(found, rel=0.025 if load == 3 else 1e-6)
        else:
            assert found * (1 - 1e-6) <= run <= found * 1.16


@pytest.mark.first(1)
@pytest.mark.parametrize(("max_staleness", "error"), [(1, 0.05), (2, 1e-6), (3, 1e-6)])
def test_the_period_of_nodes_that_work_a_step_ahead_is_that_of_the_run(max_staleness: int, error: float):
    """Three groups in a row; two batches are formed and not yet trained at most.

    With eta = 1 the run may wait for weights in the midst of a batch, where the estimate has them before.
    """
    nodes = [
        batch("values", "a", reads=("ref",)),
        batch("advantage", "b", "values"),
        batch("train", "c", "advantage", writes=("actor",)),
    ]
    what = schedule([generated(size=1)], nodes, max_staleness=max_staleness, num_steps=96, max_concurrent=2)
    for gen, values, train, load in product((1.0, 7.0), (2.0, 6.0), (2.0, 5.0), (0.0, 0.5)):
        seconds = {"gen": gen, "values": values, "advantage": 3.0, "train": train}
        seconds |= {ENGINE: load, PUBLISH: load / 2}
        assert period(what, seconds).seconds == pytest.approx(simulate(what, seconds).period(), rel=error)


@settings(max_examples=50, **SLOW)
@given(timed_schedules("written", "actor"))
def test_bars_of_a_lane_do_not_overlap(timed: Timed):
    found = steady_period(timed.schedule, timed.seconds)
    if found is None:
        return
    around = found.seconds * found.num_steps
    assert min(slot.start for slot in found.slots) == 0.0
    for lane, idle in found.idle:
        busy = sum(slot.seconds for slot in found.slots if slot.lane == lane)
        assert idle == pytest.approx(1 - busy / around, abs=1e-9)


# ----------------------------------------------------------------------------------- by hand
def test_a_chain_on_one_group_takes_the_sum():
    assert period(chain("g", "g", "g"), SECONDS).seconds == 3 + 1 + 5


def test_a_chain_on_two_groups_takes_the_slower_one():
    assert period(chain("a", "a", "b"), SECONDS).seconds == 5


def test_a_written_stream_is_one_batch_ahead():
    """No device holds it back, but two batches are under way at most: (4 + 4 + 4) / 2."""
    found = period(chain("a", "b", "c"), dict.fromkeys(SECONDS, 4.0))
    assert found.seconds == 6
    assert rows(found) == [
        ("gen", 0.0, "batch formed", 0),
        ("values", 4.0, "data", 0),
        ("advantage", 4.0, "data", 0),
        ("train", 4.0, "one batch ahead", 2),
    ]


def test_colocated_grpo_takes_the_sum():
    """40 to generate + 3 to score + 5 + 20 + 2 to give the engine its weights."""
    seconds = {"gen": 40.0, "score": 3.0, "ref": 5.0, "actor_train": 20.0, ENGINE: 2.0}
    what = grpo(shared=True, num_steps=12)
    found = period(what, seconds)
    assert found.seconds == 70 == pytest.approx(simulate(what, seconds).period())
    assert rows(found) == [
        ("gen", 40.0, "data", 0),
        ("score", 3.0, "data", 0),
        ("advantage", 0.0, "batch formed", 0),
        ("ref", 5.0, "data", 0),
        ("actor_train", 20.0, "weights of actor, 1 step later", 1),
        (ENGINE, 2.0, "weights loaded", 0),
    ]
    assert dict(found.idle) == {"train": pytest.approx(3 / 70)}  # while the last samples are scored


def test_groups_that_overlap_take_the_slower_of_what_they_do_alone():
    """1 for new weights + 4 to generate + the slower of 3 and 5 + 2 on both."""
    nodes = [
        batch("values", "a", reads=("critic",)),
        batch("ref", "b", reads=("ref",)),
        batch("train", "a+b", "values", "ref", writes=("actor",)),
    ]
    what = schedule([generated(size=1)], nodes, shared="a+b", num_steps=96, max_concurrent=2)
    seconds = {"gen": 4.0, "values": 3.0, "ref": 5.0, "train": 2.0, ENGINE: 1.0}
    found = period(what, seconds)
    assert found.seconds == 12 == pytest.approx(simulate(what, seconds).period())
    assert dict(found.idle) == {"a": pytest.approx(2 / 12), "b": 0}
    assert [(slot.node, slot.lane) for slot in found.slots if slot.start == 0] == [
        (ENGINE, "a"),
        (ENGINE, "b"),
    ]
    assert ("train", 2.0, "weights of actor, 1 step later", 1) in rows(found)


def test_synchronous_generation_on_other_devices_takes_the_sum_too():
    found = period(rollout(shared=False), {"gen": 4.0, "train": 5.0, PUBLISH: 0.25, ENGINE: 0.5})
    assert found.seconds == 9.75
    assert found.slots == (
        Slot(PUBLISH, "g", 0.0, 0.25),
        Slot(ENGINE, ENGINE, 0.25, 0.5),
        Slot("gen", ENGINE, 0.75, 4.0),
        Slot("train", "g", 4.75, 5.0),
    )
    assert dict(found.idle) == {"g": pytest.approx(4.5 / 9.75), ENGINE: pytest.approx(5.25 / 9.75)}


def test_stale_generation_hides_behind_training():
    """The writer waits for the copy that the engine takes, and not for the engine: 5 + 0.25."""
    what = rollout(shared=False, max_staleness=1)
    found = period(what, {"gen": 4.0, "train": 5.0, PUBLISH: 0.25, ENGINE: 0.5})
    assert rows(found) == [
        ("train", 5.0, "weights of actor, 1 step later", 1),
        (PUBLISH, 0.25, "weights published before anything else", 0),
    ]


def test_without_publishing_the_writer_waits_for_the_engine():
    """5 + 0.5."""
    what = replace(rollout(shared=False, max_staleness=1), publishers=())
    assert rows(period(what, {"gen": 4.0, "train": 5.0, ENGINE: 0.5})) == [
        ("train", 5.0, "weights of actor, 1 step later", 1),
        (ENGINE, 0.5, f"{ENGINE} has the weights before they change", 0),
    ]


def test_nodes_after_the_writer_wait_for_the_copy():
    """The checkpoint too: 5 + 0.25 + 2."""
    nodes = [batch("train", "g", writes=("actor",)), batch("save", "g", "train")]
    what = schedule([generated(size=1)], nodes, max_staleness=2, num_steps=96, max_concurrent=2)
    seconds = {"gen": 4.0, "train": 5.0, "save": 2.0, PUBLISH: 0.25, ENGINE: 0.5}
    found = period(what, seconds)
    assert found.seconds == 7.25 == pytest.approx(simulate(what, seconds).period())
    assert rows(found) == [
        ("train", 5.0, "weights of actor, 1 step later", 1),
        (PUBLISH, 0.25, "weights published before anything else", 0),
        ("save", 2.0, "next step on group g", 0),
    ]


def test_training_hides_behind_stale_generation():
    """Two steps behind: the edge that would lead back is counted with the next one."""
    found = period(rollout(shared=False, max_staleness=2), {"gen": 7.0, "train": 5.0, ENGINE: 0.5})
    assert rows(found) == [
        ("gen", 7.0, "next batch of gen", 0),
        (ENGINE, 0.5, "weights loaded, 1 step later", 1),
    ]


def test_weights_every_second_step_are_shared_by_both():
    """(4 + 5) + (4 + 5) + 0.5 in two steps."""
    found = period(rollout(shared=True, sync_every=2), {"gen": 4.0, "train": 5.0, ENGINE: 0.5})
    assert found.seconds == 18.5 / 2
    assert found.num_steps == 2
    assert [slot.node for slot in found.slots] == [ENGINE, "gen", "train", "gen", "train"]


# ------------------------------------------------------------------------------- not every step
def with_save(every: int, **more: int) -> Schedule:
    save = batch("save.actor", "g", "train", every=every, after=every - 1, at_end=True)
    nodes = [batch("train", "g", writes=("actor",)), save]
    return schedule([encoded()], nodes, **{"num_steps": 1000, **more})


def test_a_node_of_every_third_step_is_unrolled():
    """5 + 5 + 5 + 6 in three steps."""
    found = period(with_save(3), {"train": 5.0, "save.actor": 6.0})
    assert found.seconds == 7
    assert found.num_steps == 3
    assert [slot.start for slot in found.slots] == [0.0, 5.0, 10.0, 15.0]


def test_no_node_waits_for_one_that_does_not_fire():
    """`train` waits for `check` on the other group, and so for `slow`, in every second step only.

    In the step after, both continue side by side: 8 + 6 in the first step, 1 + 8 in the second.
    """
    nodes = [
        batch("first", "b"),
        batch("slow", "a", "first"),
        batch("check", "a", every=2),
        batch("train", "b", "check", writes=("actor",)),
    ]
    what = schedule([encoded()], nodes, num_steps=96)
    seconds = {"first": 1.0, "slow": 8.0, "train": 6.0}
    assert period(what, seconds).seconds == 23 / 2 == simulate(what, seconds).period()


def test_a_rare_node_counts_with_its_mean():
    """5 + 6 / 50 a step."""
    found = period(with_save(50), {"train": 5.0, "save.actor": 6.0})
    assert found.seconds == pytest.approx(5.12)
    assert found.slots[1] == Slot("save.actor", "g", 5.0, pytest.approx(0.12))


def test_a_node_that_fires_once_is_not_in_the_steady_state():
    assert period(with_save(1000), {"train": 5.0, "save.actor": 6.0}).seconds == 5
    assert steady_period(with_save(1000), {"save.actor": 6.0}) is None


def test_equal_laps_are_listed_once():
    """Two steps are unrolled for `log`, which the critical cycle does not see."""
    nodes = [batch("train", "g", writes=("actor",)), batch("log", "h", every=2)]
    found = period(schedule([encoded()], nodes, num_steps=96), {"train": 5.0, "log": 1.0})
    assert rows(found) == [("train", 5.0, "weights of actor, 1 step later", 1)]


def test_side_streams_are_left_out():
    seconds = {"gen": 4.0, "train": 5.0, "eval": 100.0, "accuracy": 100.0}
    side = ScheduledStream("eval", "eval", 1, None, (ENGINE,), ("actor",), every=2)
    nodes = [batch("train", "g", writes=("actor",)), batch("accuracy", "g", stream="eval")]
    what = schedule([generated(size=1), side], nodes, shared="g", num_steps=96)
    assert period(what, seconds).seconds == 9


def test_without_seconds_there_is_no_period():
    assert steady_period(chain("a", "a", "b"), {}) is None
    assert steady_period(chain("a", "a", "b"), {"train": 0.0}) is None


def test_a_node_without_seconds_takes_no_time():
    assert period(chain("g", "g", "g"), {"train": 5.0}).seconds == 5


# ------------------------------------------------------------------------------------ what people read
def test_the_cycle_starts_with_the_first_node_of_the_schedule():
    assert rows(period(chain("g", "g", "g"), SECONDS)) == [
        ("values", 3.0, "data", 0),
        ("advantage", 1.0, "data", 0),
        ("train", 5.0, "next step on group g", 1),
    ]


def test_edges_are_named_by_their_fields():
    found = period(chain("g", "g", "g"), SECONDS, fields={("advantage", "train"): "advantages"})
    assert [row.why for row in found.cycle] == ["data", "advantages", "next step on group g"]


def test_edges_within_a_step_are_named():
    nodes = [
        batch("prox", "g", reads=("actor",)),
        batch("log", "g"),
        batch("train", "g", "prox", writes=("actor",)),
        batch("save.actor", "h", "train"),
        batch("after", "h"),
    ]
    what = schedule([encoded()], nodes, num_steps=96)
    on_g = period(what, {"prox": 1.0, "log": 1.0, "train": 1.0})
    assert [row.why for row in on_g.cycle] == [
        "order of group g",
        "order of group g",
        "weights of actor, 1 step later",
    ]
    through = period(what, {"prox": 9.0, "train": 9.0, "save.actor": 9.0, "after": 9.0})
    assert through.seconds == 18
    assert [row.why for row in through.cycle] in (
        ["actor is read before it changes", "weights of actor, 1 step later"],
        ["order of group h", "next step on group h"],
    )
    ahead = period(what, {"train": 9.0, "save.actor": 9.0, "after": 9.5})
    assert rows(ahead) == [
        ("save.actor", 9.0, "order of group h", 0),
        ("after", 9.5, "next step on group h", 1),
    ]


def test_a_turn_is_named_by_its_group():
    """A frozen model generates: no weights come between its turns."""
    stream = ScheduledStream("gen", "gen", 1, 2, ("teacher@gen",), ("teacher",))
    what = schedule([stream], [batch("train", "g", writes=("actor",))], shared="g")
    found = period(what, {"gen": 4.0, "train": 5.0})
    assert rows(found) == [("gen", 4.0, "batch formed", 0), ("train", 5.0, "turn of group g", 1)]
    assert dict(found.idle) == {"g": 0.0}
