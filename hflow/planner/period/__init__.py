"""The steady state of a schedule: seconds a step, the cycle that they come from, and who waits.

Pure arithmetic on a `Schedule` and the seconds of its parts. With fixed times

- the period of batch nodes is exactly the one that `RunState` settles to on a virtual clock;
- so is that of synchronous generation where one batch is drawn a turn. It is not where all of this holds:
  engines share devices with batch nodes, a further batch may be drawn before new weights come
  (`sync_every` above 1, or a source whose weights do not change), and samples pass through sample or group
  nodes. While these work, the turn goes on and draws of the next batch, for which the period has it wait for
  its own turn; so the run may be faster than the period (in random schedules it was never slower). How much
  is drawn ahead is decided by how long those nodes take: where they take no time and the source takes some,
  that is nothing, and the period is exact again;
- that of stale generation is an estimate, for which see `rollout_arcs`.

The tests hold it to that.
"""

from __future__ import annotations

from collections.abc import Mapping

from hflow.planner.forecast import Period
from hflow.planner.ir import Schedule
from hflow.planner.period.cycle_ratio import steady_state
from hflow.planner.period.generation_edges import add_rollout, link_rollout
from hflow.planner.period.period_rows import cycle_rows, idle_shares, slots
from hflow.planner.period.steady_events import SteadyEvents
from hflow.planner.period.timed_graph import Fields, TimedGraph, link_batch_nodes


def steady_period(
    schedule: Schedule, seconds: Mapping[str, float], fields: Fields | None = None
) -> Period | None:
    """The period of a schedule, its critical cycle, and when everything runs.

    Nodes that fire every n steps are unrolled where the steps after which all comes back are
    `recurring.MOST_STEPS` at most; rarer ones count in every step, with their mean. The slots cover the
    steps unrolled.

    Args:
        schedule: what is run.
        seconds: node -> seconds of one firing; a source -> of one whole batch; a replica -> to take new
            weights, and `publish.REPLICA` -> to publish them. What is not named takes no time.
        fields: (producer, consumer) -> the fields between them, to name edges of the cycle by.

    Returns:
        None where nothing that comes back takes time.
    """
    recurring = SteadyEvents(schedule)
    graph = timed_graph(recurring, seconds, fields or {})
    state = steady_state(len(graph.vertices), graph.arcs)
    if state is None or state.ratio <= 0:
        return None
    bars = slots(graph, state)
    return Period(
        seconds=state.ratio,
        cycle=cycle_rows(schedule, graph, state),
        slots=bars,
        idle=idle_shares(recurring.lanes(), bars, state.ratio * graph.num_unrolled),
        num_steps=graph.num_unrolled,
    )


def timed_graph(recurring: SteadyEvents, seconds: Mapping[str, float], fields: Fields) -> TimedGraph:
    """Everything that fires in the steady state, and what it waits for."""
    graph = TimedGraph(recurring.num_unrolled)
    for step in range(graph.num_unrolled):
        add_rollout(graph, recurring, seconds, step)
        for node in recurring.nodes:
            fires = recurring.fires(node, step)
            spent = seconds.get(node.name, 0.0) * recurring.share(node) if fires else 0.0
            graph.add(node.name, step, spent, (node.group or node.name,), is_shown=fires)
    link_batch_nodes(graph, recurring, fields)
    link_rollout(graph, recurring, fields)
    return graph
