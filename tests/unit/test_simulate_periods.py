"""The simulator's periods against what can be worked out by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from state_script import ENGINE, batch, encoded, generated, schedule

from hflow.planner.plan.rows import PUBLISH_PREFIX, ScheduledStream
from hflow.runtime.simulation.simulate import simulate


def chain(*groups: str):
    """values -> advantage -> train, each on the group that is named."""
    nodes = [
        batch("values", groups[0], reads=("critic",)),
        batch("advantage", groups[1], "values"),
        batch("train", groups[2], "advantage", writes=("actor",)),
    ]
    return schedule([encoded()], nodes, num_steps=12)


SECONDS = {"values": 3.0, "advantage": 1.0, "train": 5.0}


def test_a_chain_on_one_group_takes_the_sum_of_its_durations():
    timeline = simulate(chain("g", "g", "g"), SECONDS)
    assert timeline.period() == pytest.approx(9.0)
    assert timeline.step_ends == pytest.approx([9.0 * (step + 1) for step in range(12)])


def test_a_chain_on_two_groups_overlaps():
    """The slower group sets the pace: the other works one step ahead."""
    timeline = simulate(chain("a", "a", "b"), SECONDS)
    assert timeline.period() == pytest.approx(5.0)
    trains = [span for span in timeline.spans if span.name == "train"]
    values = [span for span in timeline.spans if span.name == "values"]
    assert values[1].start < trains[0].end


def test_nodes_on_one_lane_never_overlap():
    timeline = simulate(chain("a", "b", "a"), SECONDS)
    for lane in ("a", "b"):
        spans = [span for span in timeline.spans if span.lane == lane]
        assert len(spans) > 1
        assert all(before.end <= after.start for before, after in pairwise(spans))


def rollout(*, shared: bool, **more: int):
    nodes = [batch("train", "g", writes=("actor",))]
    return schedule([generated(size=1)], nodes, shared="g" if shared else "", num_steps=12, **more)


@pytest.mark.parametrize(
    ("shared", "max_staleness", "period"),
    [
        (True, 0, 4.0 + 5.0 + 0.5),  # turns: generate, train, new weights
        (False, 0, 4.0 + 5.0 + 0.25 + 0.5),  # synchronous: separate devices do not help
        (False, 1, 5.0 + 0.25),  # generation and loading hide behind training; publishing does not
    ],
)
def test_period_of_generation_and_training(shared: bool, max_staleness: int, period: float):
    seconds = {"gen": 4.0, "train": 5.0, PUBLISH_PREFIX + ENGINE: 0.25, ENGINE: 0.5}
    timeline = simulate(rollout(shared=shared, max_staleness=max_staleness), seconds)
    assert timeline.period() == pytest.approx(period)
    assert timeline.finish.reason == "done"


def test_an_interrupted_sample_keeps_its_progress():
    """Sample 2 runs from 13 s, gives way to new weights from 17.5 s to 18 s, and ends at 20.5 s."""
    nodes = [batch("train", "g", writes=("actor",))]
    plan = schedule([generated(size=1, num_groups=1)], nodes, num_steps=4, max_staleness=1)
    timeline = simulate(plan, {"gen": 7.0, "train": 5.0, ENGINE: 0.5})
    assert timeline.step_ends[:3] == pytest.approx([7.5 + 5.0, 12.5 + 5.0, 20.5 + 5.0])


def test_evaluations_end_and_need_no_step():
    side = ScheduledStream("eval", "eval", 1, None, (ENGINE,), ("actor",), every=3)
    plan = schedule([generated(size=1), side], [batch("train", "g", writes=("actor",))], num_steps=4)
    timeline = simulate(plan, {"gen": 1.0, "train": 1.0, "eval": 2.0}, rows={"eval": 3})
    assert len(timeline.step_ends) == 4
    assert timeline.finish.reason == "done"


def test_a_period_needs_some_steps():
    with pytest.raises(ValueError, match="at least four"):
        simulate(schedule([encoded()], [batch("train", "g")], num_steps=3), {}).period()
