"""The headline of the page: whether the plan fits, its speed, what limits it, and its staleness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.base.text import format_bytes, format_count, format_seconds, format_share, pluralize
from hflow.planner.forecast.figures import step_seconds
from hflow.planner.models.choices import determinism_line
from hflow.planner.plan.cluster import ClusterSpec, used_links
from hflow.planner.plan.forecast import Forecast, Period
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.workload import expected_max
from hflow.report.html.plan.gantt import ref_of
from hflow.report.text.plan.assumptions import (
    calibration_text,
    lengths_text,
    reached_text,
)
from hflow.report.text.plan.header import attention_line, engines_line, largest_batch_line, layers_line
from hflow.report.text.section import limit_text


@dataclass(frozen=True)
class Tile:
    """One number of the headline."""

    label: str
    value: str
    note: str
    term: str
    """The glossary term that explains it."""


@dataclass(frozen=True)
class CycleLink:
    """One node of the critical cycle, and the edge that leaves it."""

    node: str
    ref: str
    seconds: str
    percent: float
    """The share of the cycle's seconds."""
    share: str
    why: str
    leads_back: bool
    """Whether the edge crosses steps."""


@dataclass(frozen=True)
class Headline:
    """The top of the page."""

    verdict: str
    story: tuple[str, ...]
    tiles: tuple[Tile, ...]
    cycle: tuple[CycleLink, ...]
    assumptions: tuple[str, ...]
    missing: tuple[str, ...]
    limits: tuple[str, ...]
    """What makes a step longer than necessary."""
    warnings: tuple[str, ...]


def headline(plan: Plan) -> Headline:
    """Return the headline of a plan."""
    forecast, period = plan.forecast, plan.forecast.period
    return Headline(
        verdict=_verdict(plan),
        story=tuple(_story(plan, period)),
        tiles=tuple(_tiles(plan, forecast, period)),
        cycle=tuple(_cycle(plan, period)) if period else (),
        assumptions=tuple(_assumptions(plan)),
        missing=forecast.missing,
        limits=tuple(map(limit_text, forecast.limits)),
        warnings=(*(f"Cannot run: {reason}" for reason in plan.unrunnable), *plan.warnings),
    )


def _verdict(plan: Plan) -> str:
    if plan.unrunnable:
        return "It cannot run as configured; the warnings say what to change."
    peak = _peak(plan)
    if peak is None:
        return "It can be laid out; whether it fits in memory is not known."
    total, phase = peak
    capacity = plan.cluster.memory_bytes
    if total > capacity:
        return (
            f"It does not fit: {phase} needs {format_bytes(total)} on a device with {format_bytes(capacity)}."
        )
    return f"It fits, with {format_share(1 - total / capacity)} of the fullest device's memory to spare."


def _peak(plan: Plan) -> tuple[int, str] | None:
    rows = plan.forecast.memory
    return max(((row.total, row.phase) for row in rows), key=lambda pair: pair[0], default=None)


def _story(plan: Plan, period: Period | None) -> Iterator[str]:
    stream = plan.schedule.streams[0]
    prompts, each = stream.batch or 0, stream.group_size
    samples = f" and {each} answers to each, {prompts * each:,} samples in all" if each > 1 else ""
    kind = plan.hardware.device.name
    where = pluralize(plan.cluster.num_devices, f"{kind.upper()} device")
    machines = f" in {pluralize(plan.cluster.num_nodes, 'machine')}" if plan.cluster.num_nodes > 1 else ""
    yield (
        f"{pluralize(plan.schedule.num_steps, 'step')} on {where}{machines}; "
        f"each learns from {pluralize(prompts, 'prompt')}{samples}."
    )
    if plan.engines:
        yield f"Generation engine: {engines_line(plan)}."
    if plan.attention:
        yield f"Attention: {attention_line(plan)}."
    if plan.layers:
        yield f"Layers: {layers_line(plan)}."
    if batch := largest_batch_line(plan):
        yield f"Largest batch: {batch}."
    if determinism := determinism_line(plan):
        yield f"Deterministic: {determinism}."
    if period is not None and period.cycle:
        slowest = max(period.cycle, key=lambda step: step.seconds)
        yield (
            f"A step takes {_at_least(plan)}. To make it shorter, {slowest.node} has to become "
            f"faster: it takes {format_seconds(slowest.seconds)} on the critical cycle."
        )


def _at_least(plan: Plan) -> str:
    seconds, is_lower_bound = step_seconds(plan)
    text = format_seconds(seconds or 0.0)
    return f"at least {text}" if is_lower_bound else text


def _tiles(plan: Plan, forecast: Forecast, period: Period | None) -> Iterator[Tile]:
    peak = _peak(plan)
    if peak is not None:
        of = f"of {format_bytes(plan.cluster.memory_bytes)}, in {peak[1]}"
        yield Tile("Peak memory", format_bytes(peak[0]), of, "peak")
    if period is not None:
        yield from _speed(plan, forecast, period)
    yield Tile("Staleness", *_staleness(plan), "staleness")


def _staleness(plan: Plan) -> tuple[str, str]:
    """Return the staleness certificate, and what it follows from."""
    bound, schedule = plan.staleness_bound, plan.schedule
    if bound is None:
        return "unbounded", "no rule drops old samples"
    if not schedule.streams[0].models:
        return "none", "no model makes the samples"
    why = f"max_staleness {schedule.settings.max_staleness}, sync_every {schedule.settings.sync_every}"
    return "on policy" if bound == 0 else f"≤ {pluralize(bound, 'version')}", why


def _speed(plan: Plan, forecast: Forecast, period: Period) -> Iterator[Tile]:
    stream = plan.schedule.streams[0]
    samples = (stream.batch or 0) * stream.group_size
    lengths = dict(forecast.workload).get(stream.name)
    seconds, is_lower_bound = step_seconds(plan)
    if not seconds:
        return
    condition = (
        "at least: waiting for late responses is left out" if is_lower_bound else "in the steady state"
    )
    yield Tile("Period", format_seconds(seconds), f"a step, {condition}", "period")
    tokens = samples * (lengths.prompt + expected_max(lengths, 1)) / seconds if lengths else 0.0
    rate = f"{format_count(tokens)} tokens/s" if lengths else ""
    yield Tile("Throughput", f"{format_count(samples / seconds)} samples/s", rate, "throughput")
    limits = {row.node: row.limit for row in forecast.times}
    if period.cycle:
        slowest = max(period.cycle, key=lambda step: step.seconds)
        yield Tile("Bound by", slowest.node, limits.get(slowest.node, ""), "critical cycle")


def _cycle(plan: Plan, period: Period) -> Iterator[CycleLink]:
    total = sum(step.seconds for step in period.cycle) or 1.0
    for step in period.cycle:
        yield CycleLink(
            node=step.node,
            ref=ref_of(plan, step.node),
            seconds=format_seconds(step.seconds),
            percent=round(100 * step.seconds / total, 2),
            share=format_share(step.seconds / total),
            why=step.why,
            leads_back=step.lag > 0,
        )


def _assumptions(plan: Plan) -> Iterator[str]:
    for stream, lengths in plan.forecast.workload:
        yield f"Lengths of {stream}: {lengths_text(lengths)}."
    yield from _hardware(plan.hardware, plan.cluster)


def _hardware(hardware: Hardware, cluster: ClusterSpec) -> Iterator[str]:
    device = hardware.device
    speeds = ", ".join(f"{value:g} TFLOP/s in {dtype}" for dtype, value in device.tflops.items())
    yield f"Each {device.name}: {speeds}; {device.memory_gb_per_s:,g} GB/s of memory bandwidth."
    links = [
        f"{link.name} at {link.gb_per_s:,g} GB/s {where}" for link, where in used_links(cluster, hardware)
    ]
    if links:
        yield f"Links: {', '.join(links)}."
    yield f"{reached_text(hardware.calibration)}."
    yield f"Calibration: {calibration_text(hardware.calibration)}."
