"""The maximum cycle ratio: known answers, and every simple cycle of small random graphs."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hflow.planner.forecast.period.cycle_ratio import Arc, SteadyState, cycle_ratio, steady_state


def solve(*arcs: tuple[int, int, float, int]) -> SteadyState:
    """The steady state of arcs written (tail, head, seconds of the tail, lag)."""
    num_vertices = 1 + max(max(src, dst) for src, dst, _, _ in arcs)
    state = steady_state(num_vertices, [Arc(*arc) for arc in arcs])
    assert state is not None
    return state


def tails(state: SteadyState) -> set[int]:
    return {arc.src for arc in state.cycle}


def test_a_loop_of_two_takes_the_sum():
    state = solve((0, 1, 3.0, 0), (1, 0, 5.0, 1))
    assert state.ratio == 8.0
    assert state.starts == (0.0, 3.0)


def test_a_loop_that_crosses_two_steps_takes_half():
    """(3 + 5) / 2: two steps are under way at a time."""
    assert solve((0, 1, 3.0, 0), (1, 0, 5.0, 2)).ratio == 4.0


def test_the_slower_of_two_cycles_through_one_vertex_counts():
    """0-1 takes (2 + 3) / 1 = 5, 0-2 takes (2 + 9) / 2 = 5.5."""
    state = solve((0, 1, 2.0, 0), (1, 0, 3.0, 1), (0, 2, 2.0, 1), (2, 0, 9.0, 1))
    assert state.ratio == 5.5
    assert tails(state) == {0, 2}


def test_parallel_arcs_are_different_cycles():
    """4 / 2 = 2 over one arc, 4 / 1 over the other."""
    assert solve((0, 0, 4.0, 2), (0, 0, 4.0, 1)).ratio == 4.0


def test_a_tie_names_one_of_the_cycles():
    state = solve((0, 1, 2.0, 0), (1, 0, 4.0, 1), (2, 2, 6.0, 1))
    assert state.ratio == 6.0
    assert tails(state) in ({0, 1}, {2})


def test_components_share_the_slowest_pace():
    """1 / 1, 14 / 2 and a vertex on no cycle that follows the first one."""
    state = solve((0, 0, 1.0, 1), (0, 3, 1.0, 0), (1, 2, 8.0, 1), (2, 1, 6.0, 1))
    assert state.ratio == 7.0
    assert state.starts == (0.0, 0.0, 1.0, 1.0)  # 2 starts 8 s after 1, one step of 7 s later: 1 s


def test_nothing_that_takes_time_has_the_ratio_0():
    state = solve((0, 1, 0.0, 0), (1, 0, 0.0, 1))
    assert state.ratio == 0.0
    assert len(state.cycle) == 2


def test_without_a_cycle_there_is_no_pace():
    assert steady_state(3, [Arc(0, 1, 5.0, 0), Arc(1, 2, 5.0, 1)]) is None


def test_an_arc_may_lead_back_as_long_as_its_cycles_do_not():
    """(2 + 3 + 4) / (2 - 1 + 0)."""
    assert solve((0, 1, 2.0, 2), (1, 2, 3.0, -1), (2, 0, 4.0, 0)).ratio == 9.0


def test_a_cycle_that_waits_for_itself_is_refused():
    with pytest.raises(ValueError, match="a cycle of 2 arcs waits for itself"):
        solve((0, 1, 2.0, 0), (1, 0, 3.0, 0), (0, 0, 1.0, 1))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, list[Arc]]:
    """Small graphs whose arcs of lag 0 lead to higher numbers, with durations that make ties."""
    num = draw(st.integers(1, 6))
    vertex = st.integers(0, num - 1)
    seconds = draw(st.lists(st.sampled_from((0.0, 0.1, 1.0, 2.0, 7.0)), min_size=num, max_size=num))
    ends = draw(st.lists(st.tuples(vertex, vertex, st.integers(0, 3)), max_size=12))
    return num, [Arc(a, b, seconds[a], lag if a < b else max(lag, 1)) for a, b, lag in ends]


def all_ratios(num_vertices: int, arcs: list[Arc]) -> list[float]:
    """The ratio of every simple cycle; a vertex on each arc keeps parallel ones apart."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    for place, arc in enumerate(arcs, start=num_vertices):
        graph.add_edges_from([(arc.src, place), (place, arc.dst)])
    cycles = nx.simple_cycles(graph)
    return [cycle_ratio([arcs[v - num_vertices] for v in cycle if v >= num_vertices]) for cycle in cycles]


@settings(max_examples=500)
@given(graphs())
def test_no_simple_cycle_is_slower(graph: tuple[int, list[Arc]]):
    state, ratios = steady_state(*graph), all_ratios(*graph)
    if state is None:
        assert ratios == []
        return
    assert state.ratio == pytest.approx(max(ratios), rel=1e-12)
    assert cycle_ratio(state.cycle) == state.ratio
    assert all(before.dst == after.src for before, after in pairwise((*state.cycle, state.cycle[0])))


@settings(max_examples=500)
@given(graphs())
def test_starts_keep_the_pace_and_none_could_be_earlier(graph: tuple[int, list[Arc]]):
    state = steady_state(*graph)
    if state is None:
        return
    starts = state.starts
    assert min(starts) == 0.0
    free = [arc.seconds - state.ratio * arc.lag + starts[arc.src] for arc in graph[1]]
    assert all(starts[arc.dst] >= at - 1e-9 for arc, at in zip(graph[1], free, strict=True))
    reached = {arc.dst for arc, at in zip(graph[1], free, strict=True) if starts[arc.dst] <= at + 1e-9}
    assert all(start == 0.0 or vertex in reached for vertex, start in enumerate(starts))
