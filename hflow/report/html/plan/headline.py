"""The headline of the page: whether the plan fits, its speed, what limits it, and its staleness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.base.text import format_bytes, format_seconds, format_share, pluralize
from hflow.planner.plan.forecast import Period, PhaseMemory
from hflow.planner.plan.rows import Plan
from hflow.report.content import Facts, choice_lines, facts
from hflow.report.html.plan.gantt import ref_of
from hflow.report.text.plan.assumptions import assumption_lines
from hflow.report.text.section import limit_text


@dataclass(frozen=True)
class Tile:
    """One number at the top of a page."""

    label: str
    value: str
    note: str
    term: str = ""
    """The glossary term that explains it; empty: none."""


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
    forecast, period, found = plan.forecast, plan.forecast.period, facts(plan)
    return Headline(
        verdict=_verdict(plan, found.peak),
        story=tuple(_story(plan, found)),
        tiles=tuple(_tiles(plan, found)),
        cycle=tuple(_cycle(plan, period)) if period else (),
        assumptions=tuple(f"{label}: {line}." for label, line in assumption_lines(plan)),
        missing=forecast.missing,
        limits=tuple(map(limit_text, forecast.limits)),
        warnings=(*(f"Cannot run: {reason}" for reason in plan.unrunnable), *plan.warnings),
    )


def _verdict(plan: Plan, peak: PhaseMemory | None) -> str:
    if plan.unrunnable:
        return "It cannot run as configured; the warnings say what to change."
    if peak is None:
        return "It can be laid out; whether it fits in memory is not known."
    total, capacity = peak.total, plan.cluster.memory_of(peak.devices[0])
    if total > capacity:
        needed, memory = format_bytes(total), format_bytes(capacity)
        return f"It does not fit: {peak.phase} needs {needed} on a device with {memory}."
    return f"It fits, with {format_share(1 - total / capacity)} of the fullest device's memory to spare."


def _story(plan: Plan, found: Facts) -> Iterator[str]:
    stream = plan.schedule.streams[0]
    prompts, each = stream.batch or 0, stream.group_size
    samples = f" and {each} answers to each, {prompts * each:,} samples in all" if each > 1 else ""
    parts = zip(plan.cluster.kinds, plan.hardware.kinds, strict=True)
    devices = [pluralize(part.num_devices, f"{kind.device.name.upper()} device") for part, kind in parts]
    where = " and ".join(devices)
    machines = f" in {pluralize(plan.cluster.num_nodes, 'machine')}" if plan.cluster.num_nodes > 1 else ""
    yield (
        f"{pluralize(plan.schedule.num_steps, 'step')} on {where}{machines}; "
        f"each learns from {pluralize(prompts, 'prompt')}{samples}."
    )
    for label, line in choice_lines(plan):
        yield f"{label.capitalize()}: {line}."
    if found.slowest is not None:
        text = format_seconds(found.seconds or 0.0)
        yield (
            f"A step takes {f'at least {text}' if found.is_lower_bound else text}. To make it shorter, "
            f"{found.slowest.node} has to become faster: it takes {format_seconds(found.slowest.seconds)} on "
            "the critical cycle."
        )


def _tiles(plan: Plan, found: Facts) -> Iterator[Tile]:
    if found.peak is not None:
        memory = plan.cluster.memory_of(found.peak.devices[0])
        of = f"of {format_bytes(memory)}, in {found.peak.phase}"
        yield Tile("Peak memory", format_bytes(found.peak.total), of, "peak")
    if found.seconds is not None:
        lower_bound = "at least: waiting for late responses is left out"
        condition = lower_bound if found.is_lower_bound else "in the steady state"
        yield Tile("Period", format_seconds(found.seconds), f"a step, {condition}", "period")
        samples, tokens = (*found.rates, "")[:2]
        yield Tile("Throughput", samples, tokens, "throughput")
        if found.slowest is not None:
            limits = {row.node: row.limit for row in plan.forecast.times}
            yield Tile("Bound by", found.slowest.node, limits.get(found.slowest.node, ""), "critical cycle")
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
