"""The head of the report: what was planned, for which cluster, and the verdicts."""

from __future__ import annotations

from collections.abc import Iterator

from rich.panel import Panel
from rich.text import Text

from hflow.base.text import (
    format_bytes,
    format_count,
    format_ranges,
    format_ranges_briefly,
    format_seconds,
    format_share,
    pluralize,
)
from hflow.planner.plan.cluster import ClusterSpec, used_links
from hflow.planner.plan.forecast import CycleStep, PhaseMemory
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.rows import Plan
from hflow.report.content import Facts, choice_lines, facts
from hflow.report.text.section import frame

MIN_SHARE = 0.01
"""Nodes with a smaller share of the critical cycle are counted, not named."""


def header(plan: Plan) -> Panel:
    """Return a frame with one line for each question that a reader asks first."""
    return frame(f"{plan.recipe} on {plan.cluster.name}", _rows(plan))


def staleness_line(plan: Plan) -> str:
    """Return the staleness certificate in one line."""
    if plan.staleness_bound is None:
        return "unbounded: no rule limits how old a trained token may be"
    schedule = plan.schedule
    return (
        f"the version lag of a trained token is at most {plan.staleness_bound} "
        f"(max_staleness {schedule.settings.max_staleness}, sync_every {schedule.settings.sync_every})"
    )


def cluster_line(plan: Plan) -> str:
    """Describe machines, devices and links in one line."""
    bound = _bound(plan.cluster)
    return " | ".join(
        _machines(*each, bound) for each in zip(plan.cluster.kinds, plan.hardware.kinds, strict=True)
    )


def _machines(cluster: ClusterSpec, hardware: Hardware, bound: str) -> str:
    kind = f"{hardware.device.name} device"
    devices = f"{pluralize(cluster.devices_per_node, kind)} of {format_bytes(cluster.memory_bytes)}"
    used = [
        f"{link.name} {format_count(link.gb_per_s)} GB/s {where}"
        for link, where in used_links(cluster, hardware)
    ]
    return "; ".join((f"{pluralize(cluster.num_nodes, 'machine')} with {devices}{bound}", *used))


def _bound(cluster: ClusterSpec) -> str:
    """Describe which cores the devices of a machine have."""
    if not cluster.cores:
        return ""
    bound = (cluster.cores_of(device) for device in range(cluster.devices_per_node))
    return ", bound to cores " + " | ".join(format_ranges(tuple(cores)) for cores in bound)


def _rows(plan: Plan) -> Iterator[tuple[str, Text]]:
    schedule, found = plan.schedule, facts(plan)
    yield "cluster", Text(cluster_line(plan))
    yield (
        "run",
        Text(
            f"{pluralize(schedule.num_steps, 'step')} of {_batch(plan)}; at most "
            f"{pluralize(schedule.settings.max_concurrent, 'sample')} in flight"
        ),
    )
    yield "digest", Text(plan.digest)
    for label, line in choice_lines(plan):
        yield label, Text(line)
    if plan.unrunnable:
        count = pluralize(len(plan.unrunnable), "reason")
        yield "runs", Text.assemble(("no", "bold red"), f": {count}, at the end of this report")
    yield "fits", _fits(plan, found.peak)
    yield from _speed(plan, found)
    yield "staleness", Text(staleness_line(plan))


def _batch(plan: Plan) -> str:
    stream = plan.schedule.streams[0]
    size = pluralize(stream.batch or 0, "prompt")
    return f"{size} x {pluralize(stream.group_size, 'sample')}" if stream.group_size > 1 else size


def _fits(plan: Plan, peak: PhaseMemory | None) -> Text:
    if peak is None:
        return Text("unknown: no memory is estimated", style="yellow")
    capacity = plan.cluster.memory_of(peak.devices[0])
    where = f"on {_devices(plan.cluster, peak.devices)} in {peak.phase}"
    size = f"{format_bytes(peak.total)} of {format_bytes(capacity)} ({format_share(peak.total / capacity)})"
    if peak.total > capacity:
        return Text.assemble(("no", "bold red"), f": {size} needed {where}")
    if plan.forecast.missing:
        return Text.assemble(("partly known", "yellow"), f": what is known takes {size} at most, {where}")
    return Text.assemble(("yes", "bold green"), f": at most {size}, {where}")


def _devices(cluster: ClusterSpec, devices: tuple[int, ...]) -> str:
    if len(devices) == cluster.num_devices and len(devices) > 1:
        return "every device"
    return f"device{'s' if len(devices) > 1 else ''} {format_ranges_briefly(devices)}"


def _speed(plan: Plan, found: Facts) -> Iterator[tuple[str, Text]]:
    period, seconds = plan.forecast.period, found.seconds
    if period is None or seconds is None:
        why = "the seconds of some nodes are not known" if plan.graph.learns else "nothing is learned"
        yield "period", Text(f"unknown: {why}", style="yellow")
        return
    note = ""
    if found.is_lower_bound:
        note = "; a lower bound, `hflow simulate` also counts waiting for late responses"
    elif format_seconds(seconds) != format_seconds(period.seconds):
        note = f", with waiting for late responses; without it {format_seconds(period.seconds)}"
    rate = f" a step: {', '.join(found.rates)}{note}"
    yield "period", Text.assemble((format_seconds(seconds), "bold"), rate)
    yield "bound by", Text(cycle_line(plan, period.cycle))


def cycle_line(plan: Plan, cycle: tuple[CycleStep, ...]) -> str:
    """Return the critical cycle in one line: its largest nodes, with their seconds."""
    total_seconds = sum(step.seconds for step in cycle)
    long = [step for step in cycle if step.seconds >= MIN_SHARE * total_seconds]
    named = " → ".join(f"{step_name(plan, step.node)} {format_seconds(step.seconds)}" for step in long)
    short = len(cycle) - len(long)
    left_out = f" ({pluralize(short, 'short node')} left out)" if short else ""
    return f"{named} → again{left_out}"


def step_name(plan: Plan, name: str) -> str:
    """Return the name of a node of the cycle; for an engine, what the engine does."""
    return f"{name} (new weights)" if any(replica.name == name for replica in plan.replicas) else name
