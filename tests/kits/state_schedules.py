"""Random schedules: graphs of sample, group and batch nodes, on groups with and without engines."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from state_script import changed, orders_of, publishers

from hflow.config.schema import ScheduleConfig
from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule, ScheduledNode, ScheduledStream

GROUPS = ("g0", "g1", "g2")


@st.composite
def sample_nodes(draw: st.DrawFn, stream: str, source: str, most: int) -> list[ScheduledNode]:
    """Sample and group nodes, each after some of the earlier ones."""
    nodes: list[ScheduledNode] = []
    for index in range(draw(st.integers(0, most))):
        earlier = [source, *(node.name for node in nodes)]
        needs = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3))
        level = draw(st.sampled_from((Level.SAMPLE, Level.GROUP)))
        keep = draw(st.booleans())
        station = draw(st.sampled_from(((), (), ("s0",), ("s1",), ("s0", "s1"))))
        nodes.append(
            ScheduledNode(f"{stream}_{level}{index}", level, stream, tuple(needs), station, keep=keep)
        )
    return nodes


@st.composite
def trained_streams(draw: st.DrawFn) -> ScheduledStream:
    kind = draw(st.sampled_from(("actor", "actor", "actor", "game", "teacher", "encode")))
    size = draw(st.integers(1, 3))
    replicas, models = {
        "actor": (("actor@gen",) if draw(st.booleans()) else ("actor@gen", "actor@gen2"), ("actor",)),
        "game": (("actor@gen", "critic@gen"), ("actor", "critic")),
        "teacher": (("teacher@gen",), ("teacher",)),
        "encode": ((), ()),
    }[kind]
    return ScheduledStream(
        "roll",
        "roll_src",
        size,
        draw(st.integers(1, 4)),
        replicas,
        models,
        min_group=draw(st.integers(1, size)),
    )


@st.composite
def side_streams(draw: st.DrawFn, index: int) -> ScheduledStream:
    kind = draw(st.sampled_from(("same", "same", "own", "teacher", "encode")))
    replicas, models = {
        "same": (("actor@gen",), ("actor",)),
        "own": ((f"actor@eval{index}",), ("actor",)),
        "teacher": (("teacher@gen",), ("teacher",)),
        "encode": ((), ()),
    }[kind]
    size = draw(st.integers(1, 2))
    return ScheduledStream(
        f"eval{index}",
        f"eval{index}_src",
        size,
        None,
        replicas,
        models,
        min_group=draw(st.integers(1, size)),
        every=draw(st.integers(1, 3)),
        after=draw(st.integers(0, 2)),
    )


def device_groups(num: int) -> st.SearchStrategy[tuple[str, ...]]:
    """One of the first groups, no group, or several of them."""
    groups = GROUPS[:num]
    one = st.sampled_from((*((group,) for group in groups), ()))
    some = st.lists(st.sampled_from(groups), unique=True, min_size=1)
    return one | some.map(lambda names: tuple(sorted(names)))


@st.composite
def engine_groups(
    draw: st.DrawFn, replicas: list[str], with_batches: list[str]
) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], list[str]]:
    """Engines on groups with batch nodes, on some of which may be nothing else, and engines apart."""
    homes: dict[str, list[str]] = {}
    for replica in replicas:
        some = draw(st.lists(st.sampled_from(with_batches), unique=True, max_size=2)) if with_batches else []
        more = draw(st.sampled_from(([], [], ["spare"]))) if some else []
        homes[replica] = [*some, *more]
    groups = (*with_batches, "spare")
    shared = tuple((g, tuple(r for r, home in homes.items() if g in home)) for g in groups)
    return tuple(row for row in shared if row[1]), [r for r, home in homes.items() if not home]


@st.composite
def batch_nodes(
    draw: st.DrawFn, streams: list[ScheduledStream], before: list[ScheduledNode], saves: bool = False
) -> list[ScheduledNode]:
    """Computes and readers first, then one writer a model, bound to all readers of that model."""
    nodes: list[ScheduledNode] = []
    group = device_groups(draw(st.integers(1, 3)))
    for index in range(draw(st.integers(0, 5))):
        stream = draw(st.sampled_from(streams)).name
        earlier = [n.name for n in (*before, *nodes) if n.stream == stream]
        needs = draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else []
        beats = {}
        if stream == streams[0].name:
            beats = {"every": draw(st.integers(1, 3)), "after": draw(st.integers(0, 2))}
        reads = draw(st.lists(st.sampled_from(("actor", "critic", "teacher")), unique=True, max_size=2))
        nodes.append(
            ScheduledNode(
                f"batch{index}", Level.BATCH, stream, tuple(needs), draw(group), tuple(reads), **beats
            )
        )
    for model in draw(st.permutations(("actor", "critic"))):
        readers = [node.name for node in nodes if model in node.reads]
        others = [n.name for n in (*before, *nodes) if n.stream == streams[0].name]
        more = draw(st.lists(st.sampled_from(others), unique=True, max_size=2)) if others else []
        nodes.append(
            ScheduledNode(
                f"{model}_train",
                Level.BATCH,
                streams[0].name,
                tuple(dict.fromkeys((*readers, *more))),
                draw(group),
                writes=(model,),
                every=draw(st.sampled_from((1, 1, 1, 2))),
                after=draw(st.sampled_from((0, 0, 0, 1))),
            )
        )
    if saves or draw(st.booleans()):
        every = draw(st.integers(1, 4))
        saved = draw(st.sampled_from(("actor_train", "critic_train")))
        nodes.append(
            ScheduledNode(
                "save.model",
                Level.BATCH,
                streams[0].name,
                (saved,),
                draw(group),
                every=every,
                after=every - 1,
                at_end=True,
            )
        )
    return nodes


@st.composite
def schedules(draw: st.DrawFn, saves: bool = False) -> Schedule:
    """Any schedule that the planner could make, and many that it would not; with `saves`, one that saves."""
    streams = [draw(trained_streams())]
    streams += [draw(side_streams(index)) for index in range(draw(st.integers(0, 2)))]
    before = [n for s in streams for n in draw(sample_nodes(s.name, s.source, 4 if s.batch else 2))]
    batch = draw(batch_nodes(streams, before, saves))
    orders = orders_of(batch)
    replicas = list(dict.fromkeys(name for stream in streams for name in stream.replicas))
    shared, apart = draw(engine_groups(replicas, [group for group, _ in orders]))
    return Schedule(
        streams=tuple(streams),
        nodes=(*before, *batch),
        orders=orders,
        shared=shared,
        num_steps=draw(st.integers(1, 6)),
        publishers=publishers(apart, batch) if draw(st.sampled_from((True, True, True, False))) else (),
        settings=ScheduleConfig(
            max_concurrent=draw(st.integers(1, 12)),
            max_refused_per_step=60,
            **draw(staleness_rules(streams[0].batch or 1)),
        ),
    )


@st.composite
def staleness_rules(draw: st.DrawFn, batch: int) -> dict[str, Any]:
    """Settings of staleness: its limit, and the rules for samples that are too old or too many."""
    every, age_rule = draw(st.integers(1, 3)), draw(st.sampled_from((True, True, False)))
    return {
        "max_staleness": draw(st.sampled_from((0, 0.25, 0.5, 1, 1.5, 2, 3))),
        "sync_every": every,
        "interrupt": draw(st.booleans()),
        "age_rule": age_rule,
        "drop_older_than": draw(st.none() | st.integers(every - 1, every + 5)) if age_rule else None,
        "queue": draw(st.none() | st.integers(batch, 3 * batch)),
    }


def synchronous(schedule: Schedule) -> Schedule:
    """The same with eta = 0 and a weight update in every step."""
    return changed(schedule, max_staleness=0, sync_every=1, drop_older_than=None)
