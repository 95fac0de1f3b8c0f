"""The steady state as a Gantt chart: lanes of bars over two periods, one colour per step.

Several steps may overlap, so a slot may begin later than one period. Step `k` begins at the left edge of the
chart, and earlier steps began before it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.base.text import MINUS, format_seconds, format_share, pluralize
from hflow.planner.plan.forecast import Limit, Period, Slot
from hflow.planner.plan.rows import PUBLISH_PREFIX, Plan
from hflow.report.text.section import limit_text

NUM_PERIODS, MOST_PERIODS = 2, 4
"""Number of periods drawn; at most the second number if some nodes do not fire in each step."""
NUM_TICKS, NUM_COLOURS = 8, 4
MINUTE, LONG = 60.0, 600.0
"""Seconds per minute, and the length in seconds from which a chart uses minutes."""
HAIR = 1e-9
"""Overlap, as a share of the chart, below which two bars count as touching."""
MIN_SHARE = 0.01
"""Smallest busy share of the chart for which a lane without devices is drawn."""


@dataclass(frozen=True)
class Bar:
    """One execution of a node, cut at the chart's edges. Positions are percentages of the chart's width."""

    node: str
    ref: str
    step: str
    colour: int
    left: float
    width: float
    row: int
    is_critical: bool
    is_cut_left: bool
    is_cut_right: bool
    tip: str


@dataclass(frozen=True)
class ChartLane:
    """One device group."""

    name: str
    note: str
    idle: str
    advice: str
    """What would use the devices while they are idle; empty if they rarely are."""
    num_rows: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Gantt:
    """The whole chart."""

    period: str
    periods: tuple[str, ...]
    """Titles of the periods, from left to right."""
    lanes: tuple[ChartLane, ...]
    ticks: tuple[tuple[str, float], ...]
    """(text, left) of the time axis."""
    steps: tuple[tuple[str, int], ...]
    """(step, colour) of the visible steps, oldest first."""
    note: str
    """What the chart leaves out."""


def gantt_view(plan: Plan) -> Gantt | None:
    """Return the chart of a plan; None if the period is unknown."""
    period = plan.forecast.period
    if period is None:
        return None
    sizes = {group.name: len(group.devices) for group in plan.groups}
    limits = plan.forecast.limits
    return period_gantt(period, sizes, groups_of(plan), limits)


def period_gantt(
    period: Period,
    sizes: Mapping[str, int],
    groups: Mapping[str, Sequence[str]],
    limits: Sequence[Limit] = (),
) -> Gantt | None:
    """Return the chart of a period; None if it takes no time.

    `sizes` is device group -> number of its devices, and `groups` replica -> its device groups. `limits` say
    what would use idle devices.
    """
    if period.seconds <= 0:
        return None
    num_periods = max(NUM_PERIODS, min(MOST_PERIODS, period.num_steps))
    chart_seconds = num_periods * period.seconds
    lanes = tuple(
        _lane(name, slots, period, chart_seconds, sizes, groups, limits)
        for name, slots in _by_lane(period, sizes, groups).items()
    )
    shown = {(bar.step, bar.colour) for lane in lanes for bar in lane.bars}
    num_hidden = period.num_steps - num_periods
    return Gantt(
        period=format_seconds(period.seconds),
        periods=tuple(f"period {i + 1}" for i in range(num_periods)),
        lanes=lanes,
        ticks=tuple(ticks(chart_seconds)),
        steps=tuple(sorted(shown, key=lambda pair: _offset(pair[0]))),
        note=f"Steps differ; {pluralize(num_hidden, 'more step')} follow before all repeats."
        if num_hidden > 0
        else "",
    )


def step_name(offset: int) -> str:
    """Return `k`, `k+1`, or with a minus sign an earlier step."""
    return "k" if offset == 0 else f"k{'+' if offset > 0 else MINUS}{abs(offset)}"


def groups_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the device groups of each replica."""
    return {replica.name: replica.groups for replica in plan.replicas}


def _by_lane(
    period: Period, sizes: Mapping[str, int], groups: Mapping[str, Sequence[str]]
) -> dict[str, list[Slot]]:
    """Return the slots of each device group (engines with their groups), then busy nodes without devices."""
    lanes: dict[str, list[Slot]] = {name: [] for name in sizes}
    for slot in period.slots:
        for lane in groups.get(slot.lane, (slot.lane,)):
            lanes.setdefault(lane, []).append(slot)
    min_seconds = MIN_SHARE * period.seconds * period.num_steps
    return {
        name: slots
        for name, slots in lanes.items()
        if name in sizes or sum(slot.seconds for slot in slots) >= min_seconds
    }


def _lane(
    name: str,
    slots: Sequence[Slot],
    period: Period,
    chart_seconds: float,
    sizes: Mapping[str, int],
    groups: Mapping[str, Sequence[str]],
    limits: Sequence[Limit],
) -> ChartLane:
    idle = {shown: share for lane, share in period.idle for shown in groups.get(lane, (lane,))}
    critical = {step.node for step in period.cycle}
    bars = [
        replace(bar, ref=_ref(bar.node, groups), is_critical=bar.node in critical)
        for slot in slots
        for bar in _bars(slot, period, chart_seconds)
    ]
    num_rows, placed = stack(bars)
    advice = [
        limit_text(limit) for limit in limits if any(name in groups.get(lane, (lane,)) for lane in limit.idle)
    ]
    return ChartLane(
        name=name,
        note=pluralize(sizes[name], "device") if name in sizes else "",
        idle=format_share(idle[name]) if name in idle else "",
        advice=" ".join(advice),
        num_rows=num_rows,
        bars=placed,
    )


def _bars(slot: Slot, period: Period, chart_seconds: float) -> Iterator[Bar]:
    """Yield every execution of a slot that overlaps the chart."""
    cycle_seconds = period.num_steps * period.seconds
    first = -math.ceil((slot.start + slot.seconds) / cycle_seconds)
    for repeat in range(first, math.ceil(chart_seconds / cycle_seconds) + 1):
        begin = slot.start + repeat * cycle_seconds
        end = begin + slot.seconds
        left, right = max(0.0, begin), min(chart_seconds, end)
        if right - left <= HAIR * chart_seconds:
            continue
        step = slot.step + repeat * period.num_steps
        since = slot.start - slot.step * period.seconds
        yield Bar(
            node=slot.node,
            ref="",
            step=step_name(step),
            colour=step % NUM_COLOURS + 1,
            left=round(100 * left / chart_seconds, 3),
            width=round(100 * (right - left) / chart_seconds, 3),
            row=0,
            is_critical=False,
            is_cut_left=begin < -HAIR * chart_seconds,
            is_cut_right=end > chart_seconds * (1 + HAIR),
            tip=f"{slot.node}, step {step_name(step)}\n{format_seconds(slot.seconds)}, "
            f"{format_seconds(max(0.0, since))} after the step's start",
        )


def _offset(name: str) -> int:
    return int(name[1:].replace(MINUS, "-") or 0)


def stack(bars: Sequence[Bar]) -> tuple[int, tuple[Bar, ...]]:
    """Give overlapping bars rows of their own; return the number of rows."""
    ends: list[float] = []
    placed = []
    for bar in sorted(bars, key=lambda bar: (bar.left, bar.width)):
        row = next((i for i, end in enumerate(ends) if end <= bar.left + 1e-2), len(ends))
        ends[row : row + 1] = [bar.left + bar.width]
        placed.append(replace(bar, row=row))
    return max(1, len(ends)), tuple(placed)


def ticks(chart_seconds: float) -> Iterator[tuple[str, float]]:
    """Return ticks at round numbers of seconds, or of minutes in a long chart."""
    unit = MINUTE if chart_seconds >= LONG else 1.0
    rough = chart_seconds / unit / NUM_TICKS
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= rough * (1 - HAIR))
    for i in range(math.floor(chart_seconds / unit / step * (1 + HAIR)) + 1):
        text = f"{i * step:g} min" if unit == MINUTE else format_seconds(i * step)
        yield text if i else "0", round(100 * i * step * unit / chart_seconds, 3)


def ref_of(plan: Plan, name: str) -> str:
    """Return the reference of what takes time in a step: a node, or an engine that receives new weights."""
    return _ref(name, groups_of(plan))


def _ref(name: str, groups: Container[str]) -> str:
    engine = name.removeprefix(PUBLISH_PREFIX)
    return f"replica:{engine}" if engine in groups else f"node:{name}"
