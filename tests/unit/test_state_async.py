"""eta > 0 on well-known recipes: exact orders, drops, drains, and random runs that reach the bound."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_driver import World
from state_schedules import schedules
from state_script import (
    ENGINE,
    Script,
    arriving,
    batch,
    changed,
    encoded,
    generated,
    group,
    grpo,
    publishers,
    sample,
    schedule,
)

from hflow.planner.plan.rows import Schedule
from hflow.planner.plan.staleness import staleness_bound
from hflow.runtime import events as ev


def single(**rules: Any) -> Schedule:
    """One trainer, engines of their own, groups of one sample."""
    return schedule(
        [generated(size=1)], [batch("train", "g", writes=("actor",))], **{"num_steps": 6, **rules}
    )


def spelled(script: Script, *words: str) -> list[str]:
    return [line for line in script.trace if line.startswith(words)]


# ------------------------------------------------------------------------------- binding
def test_nodes_of_the_next_step_overlap_the_writers_of_this_one():
    """And of no step after the next."""
    nodes = [batch("ref", "r", reads=("ref",)), batch("train", "g", "ref", writes=("actor",))]
    script = Script(schedule([generated()], nodes, max_staleness=2, num_steps=4), hold={"train"})
    script.run()
    assert spelled(script, "form", "ref", "train") == [
        "form gen 0: 0 1",
        "ref 0",
        "train 0",
        "form gen 1: 2 3",
        "ref 1",
    ]
    released = script.release("train 0")
    assert released[:4] == ["form gen 2: 4 5", "step 0", f"publish {ENGINE} 1", "ref 2"]
    assert spelled(script, "train") == ["train 0", "train 1"]


def test_the_oldest_groups_go_first():
    """Group 1 takes long; it is bound as soon as it is accepted, before younger ones that were ready."""
    script = Script(single(max_staleness=3), hold={"gen#1", "train 1"})
    script.run()
    assert spelled(script, "form") == ["form gen 0: 0 2", "form gen 1: 3 4"]
    script.release("gen#1")
    script.release("train 1")
    assert spelled(script, "form")[2] == "form gen 2: 1 5"


# ------------------------------------------------------------------------- interruption
def test_a_transfer_interrupts_and_finished_members_are_kept():
    """Sample 5 is interrupted; sample 4 of its group is not generated again."""
    script = Script(grpo(shared=False, max_staleness=2, num_steps=4), hold={"gen#5", "actor_train 1"})
    script.run()
    assert spelled(script, "sleep", "wake") == [f"wake {ENGINE} 0", f"sleep {ENGINE}", f"wake {ENGINE} 1"]
    assert script.release("gen#5") == ["score 5", "advantage 2"]
    assert "form gen 2: 2 5" in script.release("actor_train 1")
    assert len(spelled(script, "open gen 2")) == len(spelled(script, "score 4")) == 1
    assert script.trace[-1] == "done"


def test_without_interruption_the_engine_finishes_before_it_loads():
    script = Script(single(max_staleness=1, interrupt=False), hold={"gen#3"})
    script.run()
    assert spelled(script, "publish", "sleep") == [f"publish {ENGINE} 0", f"publish {ENGINE} 1"]
    assert spelled(script, "open")[-1] == "open gen 3", "what drains gets nothing new"
    assert script.release("gen#3")[:5] == [
        "form gen 1: 2 3",
        "train 1",
        f"sleep {ENGINE}",
        "step 1",
        f"wake {ENGINE} 1",
    ]


# --------------------------------------------------------------------------------- drops
def test_a_full_queue_pauses_generation_and_drops_its_oldest():
    script = Script(single(max_staleness=3, queue=2), hold={"train 0", "gen#4"})
    script.run()
    assert spelled(script, "open")[-1] == "open gen 7"
    assert spelled(script, "refuse") == [f"refuse {key} gen queue_full" for key in (2, 3, 5)]
    assert script.release("gen#4") == ["refuse 4 gen queue_full"]
    assert script.release("train 0")[:3] == ["step 0", f"publish {ENGINE} 1", "form gen 1: 6 7"]


def test_a_smaller_age_limit_admits_less():
    """What would be too old when its turn comes is not generated."""
    script = Script(single(max_staleness=5, drop_older_than=1), hold={"train"})
    script.run()
    assert spelled(script, "open")[-1] == "open gen 3"


def test_a_skipped_update_counts_as_a_step():
    """The critic warms up: the actor's version advances, and generation continues with it."""
    nodes = [
        batch("critic_train", "c", writes=("critic",)),
        batch("actor_train", "a", writes=("actor",), after=2),
    ]
    script = Script(schedule([generated(size=1)], nodes, max_staleness=1, num_steps=4))
    assert script.run()[-1] == "done"
    assert spelled(script, "wake") == [f"wake {ENGINE} {version}" for version in range(4)]
    assert spelled(script, "actor_train") == ["actor_train 2", "actor_train 3"]


# --------------------------------------------------------------------------- certificate
@pytest.mark.parametrize(
    ("rules", "bound"),
    [
        ({}, 0),
        ({"sync_every": 3}, 2),
        ({"max_staleness": 1}, 1),
        ({"max_staleness": 2, "sync_every": 3}, 8),
        ({"max_staleness": 2, "drop_older_than": 1}, 1),
        ({"max_staleness": 2, "drop_older_than": 5}, 5),
        ({"max_staleness": 2, "age_rule": False}, None),
        ({"max_staleness": 0, "age_rule": False}, 0),
        ({"max_staleness": 2, "age_rule": False, "interrupt": False}, 2),
    ],
    ids=str,
)
def test_certificates(rules: dict[str, Any], bound: int | None):
    assert staleness_bound(single(**rules)) == bound


def test_rewards_can_be_overtaken_without_interruption_too():
    nodes = [sample("score", "gen"), batch("train", "g", writes=("actor",))]
    rules = {"max_staleness": 2, "age_rule": False, "interrupt": False}
    assert staleness_bound(schedule([generated()], nodes, **rules)) is None


def test_streams_without_trained_weights_are_never_stale():
    nodes = [batch("train", "g", writes=("actor",))]
    assert staleness_bound(schedule([encoded()], nodes, max_staleness=3, age_rule=False)) == 0


@pytest.mark.parametrize("max_staleness", range(4))
@pytest.mark.parametrize("sync_every", range(1, 4))
@pytest.mark.parametrize("interrupt", [True, False])
def test_fast_engines_reach_the_certificate(max_staleness: int, sync_every: int, interrupt: bool):
    what = single(max_staleness=max_staleness, sync_every=sync_every, interrupt=interrupt, num_steps=12)
    assert most_lag(what) == staleness_bound(what) == (max_staleness + 1) * sync_every - 1


@pytest.mark.parametrize("drop_older_than", range(4))
def test_fast_engines_reach_a_smaller_age_limit(drop_older_than: int):
    what = single(max_staleness=4, drop_older_than=drop_older_than, num_steps=12)
    assert most_lag(what) == drop_older_than


def most_lag(what: Schedule) -> int:
    """Each train node waits until nothing else can proceed."""
    script = Script(what, hold={"train"})
    script.run()
    lags = [0]
    while script.state.finished is None:
        (step,) = (int(name.split()[1]) for name in script.held)
        lags.append(step - min(script.oldest[key] for key in script.batches[step]))
        script.release(f"train {step}")
    return max(lags)


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_without_the_age_rule_any_lag_can_be_had(steps: int):
    what = single(max_staleness=1, age_rule=False, num_steps=steps + 2)
    script = Script(what, hold={"gen#1", f"train {steps - 1}"})
    script.run()
    script.release("gen#1")
    script.release(f"train {steps - 1}")
    assert 1 in script.batches[steps]
    assert script.oldest[1] == 0


# ------------------------------------------------------------------------------- random runs
@st.composite
def asynchronous(draw: st.DrawFn) -> Schedule:
    """Any schedule with eta > 0, room for many samples, and engines mostly on devices of their own."""
    what = draw(schedules())
    return changed(
        what,
        max_staleness=draw(st.integers(1, 3)),
        num_steps=draw(st.integers(3, 8)),
        max_concurrent=draw(st.integers(6, 24)),
        **({"shared": (), "publishers": all_apart(what)} if draw(st.booleans()) else {}),
    )


def all_apart(what: Schedule) -> tuple[tuple[str, str], ...]:
    return publishers([name for stream in what.streams for name in stream.replicas], what.nodes)


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(asynchronous(), st.integers(0, 2**16), st.sampled_from((0.0, 0.05)), st.sampled_from((0.0, 0.1, 0.3)))
def test_no_token_exceeds_the_certificate_and_no_run_gets_stuck(
    what: Schedule, seed: int, refusal: float, stall: float
):
    """`World` checks each batch against the certificate, capacity, and that each sample ends once."""
    world = World(what, Random(seed), {"eval0": 2, "eval1": 3}, refusal, salt=seed, stall=stall)
    finish = world.run()
    if finish.error:
        assert "were refused" in finish.reason
    else:
        assert finish == ev.Finish("done")
        world.check_end()


@settings(max_examples=50, suppress_health_check=list(HealthCheck))
@given(schedules(), st.integers(0, 2**16), st.integers(0, 3))
def test_rules_of_staleness_change_nothing_in_a_synchronous_run(what: Schedule, seed: int, more: int):
    """The same instructions in the same order, whatever the age rule says and any queue that holds all the
    batches between two weight updates."""
    plain = changed(what, max_staleness=0, interrupt=True, age_rule=True, drop_older_than=None, queue=None)
    batch = what.streams[0].batch or 1
    ruled = [
        changed(plain, age_rule=False),
        changed(plain, drop_older_than=plain.settings.sync_every - 1 + more),
        changed(plain, queue=plain.settings.sync_every * batch + more),
    ]
    worlds = [World(w, Random(seed), {"eval0": 3, "eval1": 5}, 0.05, salt=seed) for w in (plain, *ruled)]
    for world in worlds:
        world.run()
    assert all(world.trace == worlds[0].trace for world in worlds)


def test_models_with_common_devices_share_a_queue():
    """`first` and `third` have no common devices, but `second` is between them."""
    nodes = [
        arriving("first", "m", "gen"),
        arriving("second", "m+n", "gen"),
        arriving("third", "n+o", "gen"),
        arriving("apart", "p", "gen"),
        group("keeps", "first", "second", "third", "apart", keep=True),
        batch("train", "g", writes=("actor",)),
    ]
    what = schedule([generated(size=1, num_groups=1)], nodes, num_steps=1, max_concurrent=1)
    run = Script(what, hold={"first", "second"})
    assert {line.split()[0] for line in run.run()}.isdisjoint({"second", "third"})
    assert set(run.held) == {"first on 0"}
    assert "apart on 0" in run.trace
    assert [name for name, _ in run.state.parts.streaming.num_runs()] == ["m", "p"]
    assert run.release("first on 0") == ["second on 0"]
    assert "third on 0" in run.release("second on 0")


def test_samples_that_arrive_during_an_inference_run_together_next():
    nodes = [
        arriving("rm", "m", "gen"),
        group("keeps", "rm", keep=True),
        batch("train", "g", writes=("actor",)),
    ]
    what = schedule([generated(size=2, num_groups=3)], nodes, num_steps=1, max_concurrent=6)
    run = Script(what, hold={"rm"})
    trace = run.run()
    assert [line for line in trace if line.startswith("rm")] == ["rm on 0"]
    assert run.state.parts.streaming.queues["m"].waiting == deque([("rm", 1), ("rm", 2)])
