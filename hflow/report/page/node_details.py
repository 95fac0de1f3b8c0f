"""The details of a node: what it reads and returns, where, when and for how long it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.graph.field_table import UNIT_NAMES
from hflow.graph.ir import Node, Read
from hflow.planner.forecast import NodeTime
from hflow.planner.ir import Plan
from hflow.report.formatting import plural, range_text, seconds_text
from hflow.report.page.shapes import VERBS, known_verb

Facts = tuple[tuple[str, str], ...]
"""(name, value) in words."""


@dataclass(frozen=True)
class TimeShare:
    """A share of a node's time."""

    name: str
    seconds: str
    percent: float


@dataclass(frozen=True)
class ReadRow:
    """One thing that a node reads."""

    name: str
    unit: str
    origin: str
    """The node (or dataset) that it comes from."""


@dataclass(frozen=True)
class NodeDetail:
    """One node in words."""

    name: str
    verb: str
    shape: str
    what: str
    reads: tuple[ReadRow, ...]
    returns: tuple[tuple[str, str], ...]
    """(field, unit)."""
    facts: Facts
    time: str
    limit: str
    parts: tuple[TimeShare, ...]
    knobs: Facts


def node_details(plan: Plan) -> tuple[NodeDetail, ...]:
    """Return the details of every node of the graph."""
    times = {row.node: row for row in plan.forecast.times} if plan.forecast else {}
    return tuple(_detail(plan, node, times.get(node.name)) for node in plan.graph.nodes)


def time_parts(time: NodeTime | None) -> tuple[TimeShare, ...]:
    """Return the parts of a node's time with their shares."""
    if time is None or time.seconds <= 0:
        return ()
    return tuple(
        TimeShare(name, seconds_text(seconds), round(100 * seconds / time.seconds, 2))
        for name, seconds in time.parts
        if seconds > 0
    )


def _detail(plan: Plan, node: Node, time: NodeTime | None) -> NodeDetail:
    spec = node.spec
    knobs = [(knob.name, str(knob.value)) for knob in spec.knobs]
    options = [(name, str(value)) for name, value in spec.options if value is not None]
    return NodeDetail(
        name=node.name,
        verb=spec.verb,
        shape=known_verb(spec.verb),
        what=VERBS[known_verb(spec.verb)],
        reads=tuple(_read(plan, node, read) for read in node.reads),
        returns=() if spec.verb == "train" else tuple((r.field, UNIT_NAMES[r.unit]) for r in spec.returns),
        facts=tuple(_facts(plan, node)),
        time=seconds_text(time.seconds) if time and time.seconds else "",
        limit=time.limit if time else "",
        parts=time_parts(time),
        knobs=(*knobs, *options),
    )


def _read(plan: Plan, node: Node, read: Read) -> ReadRow:
    name = (
        read.field if read.parameter in (read.field, f"@{read.field}") else f"{read.parameter} = {read.field}"
    )
    unit = UNIT_NAMES[read.unit]
    if read.source_unit is not read.unit:
        unit += f" (repeats {UNIT_NAMES[read.source_unit]})"
    if read.producer != node.name:
        return ReadRow(name, unit, read.producer)
    dataset = plan.graph.stream(read.stream).dataset if node.spec.opens_stream else None
    return ReadRow(name, unit, f"dataset {dataset}" if dataset else "itself")


def _facts(plan: Plan, node: Node) -> Iterator[tuple[str, str]]:
    spec, placement = node.spec, plan.placement(node.name)
    yield "fires", _cadence(plan, node)
    for name in placement.replicas:
        replica = plan.replica(name)
        yield "runs on", f"{name}, {replica.layout} on devices {range_text(replica.workers)}"
    if not placement.replicas:
        yield "runs on", f"worker{'s' * (len(placement.heads) != 1)} {range_text(placement.heads)}"
    for group, names in plan.schedule.orders:
        if node.name in names:
            yield "turn", f"{names.index(node.name) + 1} of {len(names)} in group {group}"
    cut = dict(plan.cuts).get(node.name)
    if cut is not None:
        minibatches = "one minibatch" if cut.minibatches == 1 else f"{cut.minibatches} minibatches"
        yield "learns in", f"{minibatches}, {plural(cut.epochs, 'epoch')}"
    yield "stream", node.stream
    yield "body", f"{spec.body.module}.{spec.body.qualname}"


def _cadence(plan: Plan, node: Node) -> str:
    spec = node.spec
    levels = {row.name: row.level for row in plan.schedule.nodes}
    text = f"once a {levels.get(node.name, spec.level)}"
    if spec.opens_stream:
        stream = plan.graph.stream(node.stream)
        text = f"streams all the time, {plural(stream.group, 'sample')} a prompt"
    if (spec.every, spec.after) != (1, 0):
        text += f", every {spec.every} steps" + (f" after {spec.after}" if spec.after else "")
    return text
