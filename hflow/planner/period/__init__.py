"""The steady state of a schedule: the seconds of a step, the cycle that determines them, and idle devices.

This is pure arithmetic on a `Schedule` and the seconds of its nodes. If all durations are fixed, tests hold
these statements:

- The period of batch nodes is exactly the one that `RunState` reaches on a virtual clock.
- So is the period of synchronous generation with one batch per turn. It is an upper bound if all of this
holds:
  engines share devices with batch nodes, a further batch may be generated before new weights arrive
  (`sync_every` above 1, or a source whose weights do not change), and samples pass through sample or group
  nodes. While those nodes run, the engines already generate samples of the next batch, for which the period
  waits until their next turn. If those nodes take no time, the period is exact again.
- The period of asynchronous generation is an estimate; see `generation_edges`.
"""

from __future__ import annotations

from collections.abc import Mapping

from hflow.planner.forecast import Period
from hflow.planner.ir import Schedule
from hflow.planner.period.cycle_ratio import steady_state
from hflow.planner.period.generation_edges import add_generation, link_generation
from hflow.planner.period.period_rows import cycle_rows, idle_shares, slots
from hflow.planner.period.steady_events import SteadyEvents
from hflow.planner.period.timed_graph import Fields, TimedGraph, link_batch_nodes


def steady_period(
    schedule: Schedule, seconds: Mapping[str, float], fields: Fields | None = None
) -> Period | None:
    """Return the period of a schedule, its critical cycle, and when everything runs.

    Nodes that run every n steps are unrolled if the schedule repeats after at most `MAX_UNROLLED_STEPS`
    steps. Rarer nodes count in every step with their mean. The slots cover the unrolled steps.

    Args:
        schedule: what runs.
        seconds: of one execution of a node, of one whole batch of a source, of a replica that loads new
            weights, and of `publish.REPLICA`. Missing names take no time.
        fields: (producer, consumer) -> the fields between them, which name edges of the cycle.

    Returns:
        None if nothing that repeats takes time.
    """
    events = SteadyEvents(schedule)
    graph = timed_graph(events, seconds, fields or {})
    state = steady_state(len(graph.vertices), graph.arcs)
    if state is None or state.ratio <= 0:
        return None
    bars = slots(graph, state)
    return Period(
        seconds=state.ratio,
        cycle=cycle_rows(schedule, graph, state),
        slots=bars,
        idle=idle_shares(events.lanes(), bars, state.ratio * graph.num_unrolled),
        num_steps=graph.num_unrolled,
    )


def timed_graph(events: SteadyEvents, seconds: Mapping[str, float], fields: Fields) -> TimedGraph:
    """Return the graph of everything that runs in the steady state, and what it waits for."""
    graph = TimedGraph(events.num_unrolled)
    for step in range(graph.num_unrolled):
        add_generation(graph, events, seconds, step)
        for node in events.nodes:
            fires = events.fires(node, step)
            spent = seconds.get(node.name, 0.0) * events.share(node) if fires else 0.0
            graph.add(node.name, step, spent, node.groups or (node.name,), is_shown=fires)
    link_batch_nodes(graph, events, fields)
    link_generation(graph, events, fields)
    return graph
