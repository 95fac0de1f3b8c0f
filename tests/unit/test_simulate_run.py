"""What a simulated run accounts for: throughput, staleness, idle devices, interruptions."""

from __future__ import annotations

from typing import Any

import pytest
from state_script import ENGINE, batch, changed, encoded, generated, schedule

from hflow.planner.plan.rows import Schedule
from hflow.planner.plan.staleness import staleness_bound
from hflow.planner.plan.workload import Workload, expected_max
from hflow.runtime.simulation.simulate import response_seconds, simulate_run
from hflow.runtime.simulation.simulation_result import LagRow

BATCH = 16


def rollout(**rules: Any) -> Schedule:
    """16 samples a step, as many in flight."""
    nodes = [batch("train", "g", writes=("actor",))]
    rules = {"max_concurrent": BATCH, "num_steps": 40, **rules}
    return schedule([generated(size=1, num_groups=BATCH)], nodes, **rules)


def responses(cv: float, seed: int = 0) -> Any:
    return response_seconds(Workload(0, 200, cv, 10_000), 0.01, seed)


def test_synchronous_devices_take_turns():
    run = simulate_run(rollout(), {"gen": 2.0, "train": 6.0})
    assert run.timeline.period() == pytest.approx(8.0)
    assert run.samples_per_second == pytest.approx(BATCH / 8)
    assert dict(run.idle) == {"g": pytest.approx(0.25), ENGINE: pytest.approx(0.75)}
    assert run.mean_generating == pytest.approx(BATCH * 0.25)
    assert run.lags == (LagRow(0, 0, BATCH * 40),)
    assert (run.interruptions, run.refused) == (0, ())


def test_balanced_loads_of_even_lengths_hide_behind_each_other():
    run = simulate_run(rollout(max_staleness=2), {"gen": 2.0, "train": 2.0})
    assert run.timeline.period() == pytest.approx(2.0)
    assert dict(run.idle) == {"g": pytest.approx(0.0), ENGINE: pytest.approx(0.0)}


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_staleness_is_within_the_certificate_and_splits_into_flight_and_queue(max_staleness: int):
    what = rollout(max_staleness=max_staleness)
    run = simulate_run(what, {"gen": responses(1.0), "train": 2.0, ENGINE: 0.1})
    bound = staleness_bound(what)
    assert bound is not None
    assert 0 < max(run.staleness()) <= bound
    assert sum(run.staleness().values()) == BATCH * what.num_steps
    assert run.interruptions >= sum(row.num_samples for row in run.lags if row.in_flight)


def test_more_staleness_comes_closer_to_the_limit():
    """16 slots make 16 samples of 2 s in 2 s, as long as training takes: the limit is 2 s a step."""
    seconds = {"gen": responses(0.6), "train": 2.0}
    periods = [simulate_run(rollout(max_staleness=eta), seconds).timeline.period() for eta in (0, 1, 2, 4)]
    assert periods == sorted(periods, reverse=True)
    assert periods[0] > 2 * 2.0
    assert 2.0 / periods[-1] > 0.95


def test_interruption_gains_on_long_responses():
    seconds = {"gen": responses(1.2), "train": 2.0}
    interrupted, drained = (
        simulate_run(rollout(max_staleness=4, interrupt=interrupt), seconds) for interrupt in (True, False)
    )
    assert drained.interruptions == 0 < interrupted.interruptions
    assert {row.in_flight for row in drained.lags} == {0}
    assert interrupted.samples_per_second > drained.samples_per_second


def test_stale_samples_are_aborted_and_counted():
    run = simulate_run(rollout(max_staleness=1), {"gen": responses(1.2), "train": 2.0})
    assert dict(run.refused)["stale"] > 0


def test_a_run_is_decided_by_its_seed():
    what = rollout(max_staleness=2)
    first, again, other = (
        simulate_run(what, {"gen": responses(0.6, seed), "train": 2.0}) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("shared", ["", "g"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_steady_state_alone_has_the_same_period_and_idle_shares(max_staleness: int, shared: str):
    nodes = [batch("infer", "h"), batch("train", "g", "infer", writes=("actor",))]
    rules = {"max_concurrent": BATCH, "num_steps": 24, "max_staleness": max_staleness}
    what = schedule([generated(size=1, num_groups=BATCH)], nodes, shared=shared, **rules)
    seconds = {"gen": responses(1.0), "infer": 0.5, "train": 2.0, ENGINE: 0.1}
    whole, part = (simulate_run(what, seconds, steady_only=only) for only in (False, True))
    assert len(part.timeline.step_ends) < len(whole.timeline.step_ends) == part.timeline.num_steps
    assert part.timeline.period() == whole.timeline.period()
    assert part.idle == whole.idle
    assert part.mean_generating == whole.mean_generating


def test_written_streams_have_no_staleness():
    run = simulate_run(schedule([encoded()], [batch("train", "g")], num_steps=8), {"train": 1.0})
    assert run.lags == ()
    assert run.samples_per_second == pytest.approx(2.0)


def test_fewer_samples_run_faster():
    """Two samples of 2 s and 4 s at full slots; a sample alone is twice as fast. The first ends at 2 s, the
    other one's remaining 2 s take 1 s."""
    what = schedule([generated(2, num_groups=1)], [batch("train", "g", writes=("actor",))], num_steps=8)
    seconds = {"gen": lambda sample: 2.0 + 2.0 * (sample % 2), "train": 5.0}
    speeds = {"gen": lambda num: 2.0 if num == 1 else 1.0}
    run = simulate_run(what, seconds, slots={"gen": 2}, speeds=speeds)
    assert run.timeline.period() == pytest.approx(3 + 5)
    plain = simulate_run(what, seconds, slots={"gen": 2})
    assert plain.timeline.period() == pytest.approx(4 + 5)


def test_samples_beyond_the_slots_wait_and_begin_with_the_weights_of_their_turn():
    """Two slots for four samples of 2 s: two waves. With eta = 1 the second batch's samples are admitted at
    once, and wait through the sync at 9 s, of whose weights their first tokens are."""
    seconds = {"gen": 2.0, "train": 5.0}
    what = schedule([generated(size=2)], [batch("train", "g", writes=("actor",))], num_steps=8)
    run = simulate_run(what, seconds, slots={"gen": 2})
    assert run.timeline.period() == pytest.approx(2 + 2 + 5)
    assert run.mean_generating == pytest.approx(2 * 4 / 9)
    ahead = changed(what, max_staleness=1, num_steps=40)
    slow = simulate_run(ahead, {"gen": 2.0, "train": 1.0}, slots={"gen": 2})
    assert slow.timeline.period() == pytest.approx(4.0)
    assert max(slow.staleness()) <= 1
    assert slow.staleness()[0] > 0, "what waited for a slot has the weights with which it began"


def test_interrupted_samples_keep_their_tokens():
    """Each sample of 7 s gives way once, to the weights of a training of 5 s."""
    nodes = [batch("train", "g", writes=("actor",))]
    what = schedule([generated(size=1, num_groups=1)], nodes, num_steps=4, max_staleness=1, max_concurrent=1)
    run = simulate_run(what, {"gen": 7.0, "train": 5.0, ENGINE: 0.5})
    assert run.interruptions == 3
    assert run.seconds_kept == pytest.approx(5.0 + 5.0 + 5.0)


def test_an_engine_that_shares_a_group_is_idle_with_it():
    nodes = [batch("train", "g", writes=("actor",))]
    what = schedule([generated(size=1)], nodes, shared="g", num_steps=8)
    run = simulate_run(what, {"gen": 3.0, "train": 1.0, ENGINE: 1.0})
    assert dict(run.idle) == {"g": pytest.approx(0.2)}
    assert {span.lane for span in run.generating} == {"g"}


def test_an_engine_that_shares_two_groups_is_busy_on_both():
    """The second group has nothing else to do."""
    nodes = [batch("train", "g", writes=("actor",))]
    what = schedule([generated(size=1)], nodes, shared="g+h", num_steps=8)
    run = simulate_run(what, {"gen": 3.0, "train": 1.0, ENGINE: 1.0})
    assert dict(run.idle) == {"g": pytest.approx(0.2), "h": pytest.approx(0.4)}


def test_a_node_on_two_groups_is_busy_on_both():
    nodes = [batch("alone", "g"), batch("train", "g+h", "alone", writes=("actor",))]
    what = schedule([generated(size=1)], nodes, shared="g", num_steps=8)
    run = simulate_run(what, {"gen": 3.0, "alone": 1.0, "train": 4.0})
    assert dict(run.idle) == {"g": 0, "h": pytest.approx(0.5)}


@pytest.mark.parametrize(("cv", "max_staleness", "share"), [(0.6, 1, 0.54), (1.2, 1, 0.47), (1.2, 4, 0.93)])
def test_how_much_of_the_limit_staleness_reaches(cv: float, max_staleness: int, share: float):
    """Of the table in docs/async.md: 16 groups of 4 on 64 slots, training as long as generation alone."""
    lengths = Workload(0, 400, cv, 4000)
    balanced = expected_max(lengths, 1) * 0.01
    what = schedule(
        [generated(size=4, num_groups=16)],
        [batch("train", "g", writes=("actor",))],
        **{"num_steps": 60, "max_concurrent": 64, "max_staleness": max_staleness},
    )
    run = simulate_run(what, {"gen": response_seconds(lengths, 0.01, 0), "train": balanced})
    assert balanced / run.timeline.period() == pytest.approx(share, abs=0.02)
