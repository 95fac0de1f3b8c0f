"""The sections on time: seconds of each node, and the period with its critical cycle and a chart.

The chart has one lane per device group. It is periodic: a bar that leaves at the right continues at the left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rich.table import Table
from rich.text import Text

from hflow.base.text import format_seconds, format_share, pluralize
from hflow.planner.forecast.figures import step_seconds
from hflow.planner.plan.forecast import Period, Slot
from hflow.planner.plan.rows import Plan
from hflow.report.text.plan.header import step_name
from hflow.report.text.section import Section, add_row, dim, number, table, text

NUM_LABEL_LINES = 2
MIN_LABEL_WIDTH = 4
"""Width of a bar, in columns, from which a name without room is shortened instead of omitted."""

Label = tuple[int, str, str]
"""Column, node, and as much of its name as fits."""


def runs_of(cells: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Return (name, start, stop) of each run of equal cells."""
    start = 0
    for stop in range(1, len(cells) + 1):
        if stop == len(cells) or cells[stop] != cells[start]:
            yield cells[start], start, stop
            start = stop


def bar_labels(cells: Sequence[str]) -> list[list[Label]]:
    """Return names under their bars, in as many lines as they need; long bars are placed first."""
    lines: list[list[Label]] = [[] for _ in range(NUM_LABEL_LINES)]
    runs = [run for run in runs_of(cells) if run[0]]
    for name, start, stop in sorted(runs, key=lambda run: run[1] - run[2]):
        rooms = [_room(line, start, len(cells)) for line in lines]
        best = next((i for i, room in enumerate(rooms) if room >= len(name)), rooms.index(max(rooms)))
        if rooms[best] >= len(name):
            lines[best].append((start, name, name))
        elif min(rooms[best], stop - start) >= MIN_LABEL_WIDTH:
            lines[best].append((start, name, f"{name[: rooms[best] - 1]}…"))
    return [sorted(line) for line in lines if line]


def _room(line: Sequence[Label], start: int, columns: int) -> int:
    """Return the free columns from `start` to the next label of a line; 0 if a label covers it."""
    before = max((column + len(shown) for column, _, shown in line if column <= start), default=-1)
    after = min((column for column, _, _ in line if column > start), default=columns + 1)
    return after - start - 1 if before < start else 0


def label_line(labels: Iterable[Label], colours: Mapping[str, str]) -> Text:
    """Return one line of labels, each in its node's colour."""
    line = Text()
    for column, name, shown in labels:
        line.append(" " * (column - len(line))).append(shown, colours[name])
    return line


NUM_PERIODS = 2
WIDEST_CHART = 70
WIDEST_NAME = 18
IDLE = len("idle 100 %")
MOST_LANES = 6
MIN_SHARE = 0.01
"""Smallest busy share for which a lane that is neither a group nor an engine is drawn."""
FILLS = "█▓▒░"
"""Fills that distinguish neighbours without colours."""
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "dark_orange3", "steel_blue")
WAITS = "·"


def gantt(period: Period, width: int) -> Iterator[Table | Text]:
    """Return the chart of two periods, or of all steps of a longer cycle, and what it leaves out."""
    lanes, num_steps = _lanes(period), max(NUM_PERIODS, period.num_steps)
    names = min(WIDEST_NAME, max(map(len, lanes[:MOST_LANES]), default=0))
    columns = max(1, min(WIDEST_CHART, width - names - IDLE - 2))
    chart = Table.grid(padding=(0, 1, 0, 0))
    chart.add_column(overflow="fold", width=names)
    chart.add_column(width=columns, no_wrap=True)
    chart.add_column(width=IDLE, no_wrap=True)
    colours, named = _colours(period.slots), set()
    for lane in lanes[:MOST_LANES]:
        cells = _cells([slot for slot in period.slots if slot.lane == lane], period, num_steps, columns)
        chart.add_row(Text(lane, "bold"), _bars(cells, colours), _idle(period, lane))
        for labels in bar_labels(cells):
            chart.add_row("", label_line(labels, colours), "")
            named |= {name for _, name, shown in labels if name == shown}
    chart.add_row("", _axis(num_steps, period.seconds, columns), "")
    yield chart
    yield from _outside(period, named, lanes[MOST_LANES:])


def _lanes(period: Period) -> list[str]:
    """Return groups and engines first, then nodes without devices that take noticeable time."""
    busy: dict[str, float] = {}
    for slot in period.slots:
        busy[slot.lane] = busy.get(slot.lane, 0.0) + slot.seconds
    min_seconds = MIN_SHARE * period.seconds * period.num_steps
    others = (lane for lane, seconds in busy.items() if seconds >= min_seconds)
    return list(dict.fromkeys((*(lane for lane, _ in period.idle), *others)))


def _colours(slots: Iterable[Slot]) -> dict[str, str]:
    names = dict.fromkeys(slot.node for slot in slots)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def _fills(cells: Sequence[str]) -> dict[str, str]:
    """Return a fill per node: the first that none of its neighbours in the lane has."""
    neighbours: dict[str, set[str]] = {name: set() for name, _, _ in runs_of(cells)}
    for (before, _, _), (after, _, _) in pairwise(runs_of(cells)):
        neighbours[before].add(after)
        neighbours[after].add(before)
    fills: dict[str, str] = {"": WAITS}
    for name, adjacent in neighbours.items():
        taken = {fills[other] for other in adjacent if other in fills}
        fills.setdefault(name, next((fill for fill in FILLS if fill not in taken), FILLS[0]))
    return fills


def _cells(slots: Sequence[Slot], period: Period, num_steps: int, columns: int) -> list[str]:
    """Return the node that fills each column; an empty name if the lane is idle.

    A node that is too short for a column takes an otherwise empty one.
    """
    cells = [""] * columns
    scale = columns / (num_steps * period.seconds)
    cycle_seconds = period.num_steps * period.seconds
    for slot in sorted(slots, key=lambda slot: -slot.seconds):
        first = -math.ceil((slot.start + slot.seconds) / cycle_seconds)
        for again in range(first, num_steps // period.num_steps + 1):
            start = slot.start + again * cycle_seconds
            left, right = round(start * scale), round((start + slot.seconds) * scale)
            if left == right and 0 <= left < columns and not cells[left]:
                right += 1
            for column in range(max(0, left), min(columns, right)):
                cells[column] = slot.node
    return cells


def _bars(cells: Sequence[str], colours: Mapping[str, str]) -> Text:
    bars, fills = Text(), _fills(cells)
    for name, start, stop in runs_of(cells):
        bars.append(fills[name] * (stop - start), colours.get(name, "dim"))
    return bars


def _axis(num_steps: int, seconds: float, columns: int) -> Text:
    """Return the axis: where each step begins, in seconds, and where the last one ends."""
    line, end = "", f"{format_seconds(num_steps * seconds)}|"
    for i in range(num_steps):
        column = round(i * columns / num_steps)
        if len(line) < max(1, column):
            line = line.ljust(column) + f"|{format_seconds(i * seconds) if i else 0}"
    return dim(line if len(line) + len(end) >= columns else line.ljust(columns - len(end)) + end)


def _idle(period: Period, lane: str) -> Text:
    share = dict(period.idle).get(lane)
    return Text("" if share is None else f"idle {format_share(share)}")


def _outside(period: Period, named: set[str], lanes: Sequence[str]) -> Iterator[Text]:
    """Return the nodes that the chart leaves out."""
    seconds: dict[str, float] = {}
    for slot in period.slots:
        seconds[slot.node] = slot.seconds
    short = [f"{node} {format_seconds(spent)}" for node, spent in seconds.items() if node not in named]
    if short:
        yield dim(f"not named above: {', '.join(short)}")
    if lanes:
        yield dim(f"not drawn: {', '.join(lanes)}")


MOST_CYCLE_ROWS = 10
PERIOD_NOTE = (
    "Seconds per step in the steady state. The slowest cycle decides them, in which each node waits for the "
    "one before it. For a faster run, make one of these nodes faster or let it wait for less."
)


def period_section(plan: Plan, width: int) -> Section:
    """Return the critical cycle, a chart and idle shares."""
    period = plan.forecast.period
    if period is None:
        return Section("Period", absent="the seconds of some nodes are not known")
    note = PERIOD_NOTE
    if period.simulated is not None:
        note += " Cycle and chart leave out waiting for late responses; idle shares count it."
    elif step_seconds(plan)[1]:
        note += " Waiting for late responses is left out, also of idle shares."
    return Section("Period", note, (_cycle(plan, period), Text(), *gantt(period, width)))


def _cycle(plan: Plan, period: Period) -> Table:
    shown = table(text("slowest cycle"), number("seconds"), text("leads to the next by"))
    for name, seconds, why in _rows(plan, period):
        add_row(shown, Text(name, "bold"), seconds, why)
    add_row(shown, "together", *_sum(period))
    return shown


def _rows(plan: Plan, period: Period) -> Iterator[tuple[str, str, str]]:
    cycle = period.cycle
    for step in cycle[:MOST_CYCLE_ROWS]:
        yield step_name(plan, step.node), format_seconds(step.seconds), step.why
    rest = cycle[MOST_CYCLE_ROWS:]
    if rest:
        seconds = format_seconds(sum(step.seconds for step in rest))
        yield f"and {pluralize(len(rest), 'more node')}", seconds, rest[-1].why


def _sum(period: Period) -> tuple[str, str]:
    """Return the seconds around the cycle, and the number of steps that they cover."""
    whole, lag = sum(step.seconds for step in period.cycle), sum(step.lag for step in period.cycle)
    if lag == 1:
        return format_seconds(whole), "around the cycle, once a step"
    a_step = format_seconds(period.seconds)
    return format_seconds(whole), f"around the cycle, once in {pluralize(lag, 'step')}: {a_step} a step"
