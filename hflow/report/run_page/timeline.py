"""What workers did in two steps of a run, as a chart like that of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hflow.planner.plan.forecast import CycleStep, Period, Slot
from hflow.report.formatting import plural, seconds_text, share_text
from hflow.report.page.gantt import NUM_COLOURS, Bar, ChartLane, Gantt, period_gantt, stack, ticks

if TYPE_CHECKING:
    from hflow.launch.runs import MeasuredSpan

MAX_LANES = 16
"""Lanes of the chart."""
MAX_BARS = 120
"""Bars of a lane: the longest."""
NUM_STEPS = 2
"""Steps of the chart."""
DEVICE, GENERATE = "device", "generate"
LANE_ORDER = (GENERATE, "weights", DEVICE)


def measured_gantt(spans: Sequence[MeasuredSpan]) -> Gantt | None:
    """Return the chart of two steps in the middle of the trace; None without two complete steps."""
    ends: dict[int, float] = {}
    for span in spans:
        if span.lane == DEVICE and span.step is not None:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
    steps = sorted(ends)
    if len(steps) <= NUM_STEPS:
        return None
    first = (len(steps) - NUM_STEPS) // 2
    before, last = steps[first], steps[min(first + NUM_STEPS, len(steps) - 1)]
    start, end = ends[before], ends[last]
    if end <= start:
        return None
    lanes: dict[tuple[str, str], list[MeasuredSpan]] = {}
    for span in spans:
        if span.start < end and span.end > start:
            lanes.setdefault((span.worker, span.lane), []).append(span)
    ordered = sorted(lanes, key=lambda key: (_worker_number(key[0]), _lane_order(key[1]), key[1]))
    shown = ordered[:MAX_LANES]
    num_hidden = len(ordered) - len(shown)
    charts = tuple(_lane(worker, lane, lanes[worker, lane], start, end) for worker, lane in shown)
    used = sorted({(bar.step, bar.colour) for chart in charts for bar in chart.bars if bar.step})
    return Gantt(
        period=seconds_text((end - start) / max(1, last - before)),
        periods=(f"from the end of step {before} to the end of step {last}",),
        lanes=charts,
        ticks=tuple(ticks(end - start)),
        steps=tuple(used),
        note=f"{plural(num_hidden, 'more lane')} of other workers are left out." if num_hidden else "",
    )


def planned_gantt(plan: Mapping[str, Any]) -> Gantt | None:
    """Return the chart of the plan's rows; None if they have no period, or another version wrote them."""
    try:
        row = plan["forecast"]["period"]
        period = Period(
            seconds=row["seconds"],
            cycle=tuple(CycleStep(**step) for step in row["cycle"]),
            slots=tuple(Slot(**slot) for slot in row["slots"]),
            idle=tuple((lane, share) for lane, share in row["idle"]),
            num_steps=row["num_steps"],
        )
        sizes = {group["name"]: len(group["devices"]) for group in plan["groups"]}
        groups = {replica["name"]: replica["groups"] for replica in plan["replicas"]}
        chart = period_gantt(period, sizes, groups)
    except (LookupError, TypeError, ValueError):
        return None
    return chart


def _lane(worker: str, lane: str, spans: Sequence[MeasuredSpan], start: float, end: float) -> ChartLane:
    longest = sorted(spans, key=lambda span: span.start - span.end)[:MAX_BARS]
    num_rows, bars = stack([_bar(span, start, end) for span in longest])
    busy = _covered([(max(start, span.start), min(end, span.end)) for span in spans])
    return ChartLane(worker, lane, share_text(1 - busy / (end - start)), "", num_rows, bars)


def _bar(span: MeasuredSpan, start: float, end: float) -> Bar:
    left, right = max(start, span.start), min(end, span.end)
    seconds = seconds_text(span.end - span.start)
    step = "" if span.step is None else str(span.step)
    return Bar(
        node=span.name,
        ref="",
        step=step,
        colour=1 if span.step is None else span.step % NUM_COLOURS + 1,
        left=round(100 * (left - start) / (end - start), 3),
        width=round(100 * (right - left) / (end - start), 3),
        row=0,
        is_critical=False,
        is_cut_left=span.start < start,
        is_cut_right=span.end > end,
        tip=f"{span.name}{f', step {step}' if step else ''}\n{seconds}",
    )


def _covered(parts: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for first, last in sorted(parts):
        total += max(0.0, last - max(first, until))
        until = max(until, last)
    return total


def _worker_number(worker: str) -> int:
    number = worker.rpartition(" ")[2]
    return int(number) if number.isdigit() else -1


def _lane_order(lane: str) -> int:
    return LANE_ORDER.index(lane) if lane in LANE_ORDER else len(LANE_ORDER)
