"""The outputs of `hflow plan --what-if` and `hflow size`: plans beside each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hflow.base.text import TIMES, format_bytes, format_count, format_seconds, format_share
from hflow.planner.diff import Change
from hflow.planner.forecast.figures import SECONDS_PER_DAY, PlanFigures
from hflow.report.tables import TableView
from hflow.report.text.section import add_row, dim, number, table, text

if TYPE_CHECKING:
    from hflow.launch.planning.size import SizedCluster, Sizes
    from hflow.launch.planning.what_if import Changed, WhatIf

UNKNOWN = "-"
MOST_CHANGES = 3
"""Number of a plan's own changes that are named under a setting."""
FOLLOWING = {"replica": "layout", "group": "devices", "engine": "engine"}
"""Topics of a placement that follows from a setting -> what the main value of a subject is."""
AT_LEAST, AT_MOST = "\u2265 ", "\u2264 "
MAX_CHANGE = 32
"""Most characters of a change in one line of the table."""
NOTES = (
    "memory: what the fullest device needs at its peak, and the share of its memory. $: of all devices of "
    "the cluster, idle or not."
)
LOWER_BOUND = (
    f"{AT_LEAST}a step: generation runs ahead, and waiting for late responses is left out. hflow simulate "
    "counts it."
)


def render_what_if(found: WhatIf) -> RenderableType:
    """Return a row for the plan as it is, and one for each change."""
    columns = (
        number("a step"),
        number("speed"),
        number("memory"),
        number("$ a step"),
        number("$ of the run"),
    )
    shown = table(text("change"), *columns)
    is_known = found.base.seconds_per_step is not None
    add_row(shown, dim("as configured"), *_cells(found.base, 1.0 if is_known else None))
    refusals = []
    for row in found.rows:
        if row.figures is None:
            add_row(shown, broken(row.change), Text("no plan", style="red"), *[UNKNOWN] * 4)
            refusals.append(Text.assemble((f"{row.change}: ", "bold"), row.refusal or ""))
        else:
            add_row(shown, broken(row.change), *_cells(row.figures, row.speed_up))
            for line in _following(row):
                add_row(shown, dim("  " + broken(line).replace("\n", "\n    ")), *[""] * 5)
    notes = [dim(f"speed: samples trained in the same time, compared with the plan as configured. {NOTES}")]
    known = (found.base, *(row.figures for row in found.rows if row.figures))
    if any(figures.is_lower_bound for figures in known):
        notes.append(dim(LOWER_BOUND))
    unknown = dict.fromkeys(line for figures in known for line in figures.missing)
    reasons = [Text.assemble((f"{UNKNOWN} ", "bold"), line) for line in unknown]
    return Group(shown, Text(""), *refusals, *reasons, *notes)


def broken(change: str) -> str:
    """Return a change in lines that end behind a space, or behind a mark of a long setting."""
    lines = [""]
    for setting in re.split(r"(?<= )", change):
        is_long = len(setting.rstrip()) > MAX_CHANGE
        for part in re.split(r"(?<=[=_])|(?<=\.)(?!\d)", setting) if is_long else [setting]:
            if lines[-1] and len(lines[-1] + part.rstrip()) > MAX_CHANGE:
                lines.append("")
            lines[-1] += part
    return "\n".join(lines)


def _cells(figures: PlanFigures, speed_up: float | None) -> Iterator[str]:
    yield step_text(figures)
    bound = AT_MOST if figures.is_lower_bound else ""
    yield UNKNOWN if speed_up is None else f"{bound}{speed_up:.2f} {TIMES}"
    yield memory_text(figures)
    yield _bounded(figures, dollars_text(figures.dollars_per_step))
    yield _bounded(figures, dollars_text(figures.dollars))


def _following(row: Changed) -> Iterator[str]:
    """Yield what the plan decided otherwise because of a change, in a few lines: devices, then settings."""
    decided = row.diff.decided if row.diff else ()
    changes = [c for c in decided if c.topic == "setting" and c.subject in row.decided_keys]
    placed = [change for change in decided if change.topic in FOLLOWING]
    if any(change.topic == "group" for change in placed):  # which says where its replicas are
        placed = [change for change in placed if not change.subject.endswith(" devices")]
    changes = [*placed, *changes]
    for change in changes[:MOST_CHANGES]:
        yield f"{_what(change)}: {change.before or UNKNOWN} -> {change.after or UNKNOWN}"
    if len(changes) > MOST_CHANGES:
        yield f"and {len(changes) - MOST_CHANGES} more, which --json lists"


def _what(change: Change) -> str:
    """Return the changes in words; a setting is its key."""
    if change.topic not in FOLLOWING:
        return change.subject
    name, _, attribute = change.subject.partition(" ")
    return f"{attribute or FOLLOWING[change.topic]} of {'group ' * (change.topic == 'group')}{name}"


def step_text(figures: PlanFigures) -> str:
    """Return the seconds of a step, and that they are a lower bound where they are."""
    return _bounded(figures, duration_text(figures.seconds_per_step))


def _bounded(figures: PlanFigures, text: str, mark: str = AT_LEAST) -> str:
    """Return a text that follows from the seconds of a step, with a mark where these are a lower bound."""
    return f"{mark}{text}" if figures.is_lower_bound and text != UNKNOWN else text


def duration_text(seconds: float | None) -> str:
    """Return seconds as text."""
    return UNKNOWN if seconds is None else format_seconds(seconds)


def memory_text(figures: PlanFigures) -> str:
    """Return the memory of the fullest device, and its share of all."""
    if figures.peak_bytes is None:
        return UNKNOWN
    return f"{format_bytes(figures.peak_bytes)} ({format_share(figures.peak_bytes / figures.memory_bytes)})"


def dollars_text(dollars: float | None) -> str:
    """Return an amount as text."""
    if dollars is None:
        return UNKNOWN
    if 0 < dollars < 0.005:
        return "< 0.01"
    return f"{dollars:.2f}" if dollars < 100 else format_count(dollars)


SIZE_HEADINGS = ("devices", "a step", "samples/s", "whole run", "memory", "$ an hour", "$ of the run")


def render_sizes(found: Sizes) -> RenderableType:
    """Return a row for each cluster, and the chosen one."""
    shown = table(text("cluster"), *map(number, SIZE_HEADINGS))
    for row in found.rows:
        style = "bold green" if row is found.chosen else "" if row.reaches else "dim"
        cells = [Text(cell, style) for cell in size_cells(row)]
        add_row(shown, Text(row.cluster, style), *cells)
    lines = map(Text, size_lines(found))
    return Group(shown, Text(""), *lines, *map(dim, _size_notes(found)))


def _size_notes(found: Sizes) -> Iterator[str]:
    yield NOTES
    if any(row.figures.is_lower_bound for row in found.rows if row.figures):
        yield LOWER_BOUND


def size_cells(row: SizedCluster) -> tuple[str, ...]:
    """Return the cells of a cluster after its name."""
    figures = row.figures
    if figures is None:
        return (f"{row.num_devices:,}", "no plan", *[UNKNOWN] * 5)
    return (
        f"{row.num_devices:,}",
        step_text(figures),
        _bounded(
            figures,
            UNKNOWN if figures.samples_per_second is None else format_count(figures.samples_per_second),
            AT_MOST,
        ),
        _bounded(figures, duration_text(None if figures.days is None else figures.days * SECONDS_PER_DAY)),
        memory_text(figures),
        dollars_text(figures.dollars_per_hour),
        _bounded(figures, dollars_text(figures.dollars)),
    )


def size_lines(found: Sizes) -> Iterator[str]:
    """Yield what was chosen and how it is placed, and why clusters have no plan."""
    if found.chosen is not None:
        which = "cheapest" if found.is_cheapest else "smallest"
        is_bound = found.chosen.figures is not None and found.chosen.figures.is_lower_bound
        reaches = "may reach" if is_bound else "reaches"
        yield f"{found.chosen.cluster} is the {which} of these that {reaches} {found.target}:"
        yield f"  {found.chosen.placement}"
    unrunnable = [row.cluster for row in found.rows if row.reaches and not row.can_run]
    if unrunnable:
        yield f"plans that reach it but cannot run yet: {', '.join(unrunnable)}"
    refused = [row for row in found.rows if row.refusal]
    if refused:
        names, last = ", ".join(row.cluster for row in refused), refused[-1]
        which = f". On {last.cluster}" if len(refused) > 1 else ""
        yield f"no plan on {names}{which}: {last.refusal}"


def size_table(found: Sizes) -> TableView:
    """Return the same as a table of the page."""
    rows = tuple((row.cluster, *size_cells(row)) for row in found.rows)
    numbers = tuple(range(1, len(SIZE_HEADINGS) + 1))
    title, note = " ".join(size_lines(found)), " ".join(_size_notes(found))
    return TableView(title, ("cluster", *SIZE_HEADINGS), rows, numbers, note)
