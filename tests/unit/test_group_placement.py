"""Placement of groups on engines, and moves to less loaded engines."""

import plan_graphs as graphs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan_traffic_estimate import planned

from hflow.planner.data.group_placement import GroupPlacer

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
