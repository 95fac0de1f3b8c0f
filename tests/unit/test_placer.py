"""Groups that would better be on another engine."""

import plan_graphs as graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan_preview import planned

from hflow.runtime.dispatch import Placer

STREAM, SIZE, NUM_ENGINES = "actor_gen", 3, 4
PLAN, _ = planned(graphs.grpo(group=SIZE), "cpu-1x4", batch=4)


@given(st.lists(st.integers(0, SIZE), min_size=1, max_size=40), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_groups_go_one_by_one_to_the_engine_with_least_to_do(finished, rng):
    placer = Placer(PLAN)
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
    assert placer.evened(STREAM, movable) == expected
