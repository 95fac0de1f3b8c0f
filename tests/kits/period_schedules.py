"""Random schedules with fixed durations, and the steady-state period of their simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st
from state_schedules import device_groups, engine_groups
from state_script import orders_of, publishers

from hflow.config.schema import ScheduleConfig
from hflow.graph.ir import Level
from hflow.planner.plan.rows import PUBLISH_PREFIX, Schedule, ScheduledNode, ScheduledStream
from hflow.runtime.simulation.simulate import simulate

MODELS = ("actor", "critic")
SOURCES = {
    "written": ((), ()),
    "teacher": (("teacher@gen",), ("teacher",)),
    "actor": (("actor@gen",), ("actor",)),
    "game": (("actor@gen", "critic@gen"), ("actor", "critic")),
}
FEW_STEPS, MANY_STEPS, DRAIN = 100, 2000, 12
SECONDS = st.integers(0, 9).map(float)


@dataclass(frozen=True)
class Timed:
    """A schedule, and the seconds of its parts."""

    schedule: Schedule
    seconds: dict[str, float]


@st.composite
def timed_schedules(draw: st.DrawFn, *kinds: str) -> Timed:
    """Batch nodes on up to three groups and some on none, behind a source of one of the `kinds`.

    No more samples are in flight than a batch has, so that a source makes one batch after another.
    """
    replicas, models = SOURCES[draw(st.sampled_from(kinds))]
    stream = ScheduledStream(
        "roll", "src", draw(st.integers(1, 2)), draw(st.integers(1, 2)), replicas, models
    )
    samples = draw(sample_nodes())
    nodes = draw(batch_nodes(models))
    orders = orders_of(nodes)
    shared, apart = draw(engine_groups(list(replicas), [group for group, _ in orders]))
    schedule = Schedule(
        (stream,),
        (*samples, *nodes),
        orders,
        shared,
        FEW_STEPS,
        publishers=publishers(apart, nodes),
        settings=ScheduleConfig(
            sync_every=draw(st.sampled_from((1, 1, 2, 3))),
            max_concurrent=stream.group_size * (stream.batch or 1),
        ),
    )
    published = tuple(PUBLISH_PREFIX + replica for replica, _ in schedule.publishers)
    names = ("src", *replicas, *published, *(n.name for n in schedule.nodes))
    seconds = {name: draw(SECONDS) for name in names}
    ahead = models == ("teacher",) or schedule.settings.sync_every > 1
    if schedule.shared and ahead and samples:  # else the turn continues with the next ones meanwhile
        seconds |= {node.name: 0.0 for node in samples}
        seconds["src"] = max(1.0, seconds["src"])
    return Timed(schedule, seconds)


@st.composite
def sample_nodes(draw: st.DrawFn) -> list[ScheduledNode]:
    """Sample and group nodes, each after some of the earlier ones."""
    nodes: list[ScheduledNode] = []
    for index in range(draw(st.integers(0, 2))):
        earlier = ["src", *(node.name for node in nodes)]
        needs = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=2))
        level = draw(st.sampled_from((Level.SAMPLE, Level.GROUP)))
        nodes.append(ScheduledNode(f"sample{index}", level, "roll", tuple(needs)))
    return nodes


@st.composite
def batch_nodes(draw: st.DrawFn, generated: tuple[str, ...]) -> list[ScheduledNode]:
    """Readers and computes, then one writer a model, which comes after all that read it."""
    always = [model for model in MODELS if model in generated]
    others = [model for model in MODELS if model not in generated]
    written = always + draw(st.lists(st.sampled_from(others), unique=True)) if others else always
    group = device_groups(draw(st.integers(1, 3)))
    nodes: list[ScheduledNode] = []
    for index in range(draw(st.integers(0 if written else 1, 6))):
        reads = draw(st.lists(st.sampled_from((*MODELS, "teacher")), unique=True, max_size=2))
        nodes.append(draw(batch_node(f"node{index}", nodes, draw(group), reads=tuple(reads))))
    for model in written:
        readers = [node for node in nodes if model in node.reads]
        node = draw(batch_node(f"{model}_train", nodes, draw(group), writes=(model,)))
        needs = (*node.needs, *(reader.name for reader in readers))
        nodes.append(replace(node, needs=tuple(dict.fromkeys(needs))))
    return nodes


@st.composite
def batch_node(
    draw: st.DrawFn,
    name: str,
    earlier: list[ScheduledNode],
    groups: tuple[str, ...],
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
) -> ScheduledNode:
    """A node that needs some of the earlier ones, and may fire in every second or third step only."""
    names = st.sampled_from([node.name for node in earlier])
    needs = tuple(draw(st.lists(names, unique=True, max_size=2))) if earlier else ()
    every, after = draw(st.sampled_from((1, 1, 1, 1, 2, 3))), draw(st.integers(0, 3))
    return ScheduledNode(name, Level.BATCH, "roll", needs, groups, reads, writes, every=every, after=after)


def settled_period(timed: Timed, expected: float) -> float:
    """Seconds a step of a simulated run in its steady state.

    Where the first steps do not show what is expected, which is rare, the run is given many more: it
    settles slowly where two cycles have almost the same ratio.
    """
    few = _repeating(timed.schedule, timed.seconds)
    if few is not None and abs(few - expected) <= 1e-9 * expected:
        return few
    many = _repeating(replace(timed.schedule, num_steps=MANY_STEPS), timed.seconds)
    assert many is not None, "the run does not settle"
    return many


def _repeating(schedule: Schedule, seconds: dict[str, float]) -> float | None:
    """Seconds a step over the shortest stretch of steps that the second half of a run repeats.

    The last steps are not looked at, as engines get no new weights there.
    """
    ends: Sequence[float] = simulate(schedule, seconds).step_ends[:-DRAIN]
    for size in range(1, len(ends) // 4):
        gaps = [end - before for before, end in zip(ends, ends[size:], strict=False)][-(len(ends) // 2) :]
        if max(gaps) - min(gaps) <= 1e-9 * max(gaps):
            return gaps[0] / size
    return None
