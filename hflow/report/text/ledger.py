"""The output of `hflow why` (the history of one sample) and of `hflow samples` (a table, or CSV)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hflow.base.terminal import safe_text
from hflow.base.text import pluralize

if TYPE_CHECKING:
    from hflow.runtime.ledger.sample_history import GroupMember, SampleHistory, SampleTrajectory
    from hflow.runtime.records.body_log import LoggedLine


SHOWN = ("stream", "id", "row", "tokens", "oldest", "newest", "reward", "end", "step", "lag")
WHY = ("reason", "node")
"""Columns that are shown if any row has a value."""


def render_samples(rows: Sequence[dict[str, Any]], total: int, *, is_exact: bool = True) -> RenderableType:
    """Render a table of the most useful columns of `rows`, of `total` samples, or more if not `is_exact`."""
    counted = f"{'' if is_exact else 'at least '}{pluralize(total, 'sample')}"
    if not rows:
        return Text(f"{'none of ' * bool(total)}{counted}", style="dim")
    names = [*SHOWN, *(name for name in WHY if any(row[name] is not None for row in rows))]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_text = any(isinstance(row[name], str) for row in rows)
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in names))
    more = "" if len(rows) == total else f"the first {len(rows)} of "
    said = f"{more}{counted}; --json and --csv have all columns"
    return Group(table, Text(said, style="dim"))


def as_csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return CSV: a line of names, then one line per sample."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else safe_text(str(value))


STYLES = {"trained": "green", "evaluated": "green", "refused": "red", "dropped": "yellow", "unused": "yellow"}

Line = tuple[float | None, str, str]
"""Seconds since the run's start, the event, and its details."""


def render_story(story: SampleHistory) -> RenderableType:
    """Render a headline and the lines."""
    sample = story.sample
    end = sample["end"] or "no end yet"
    head = Text.assemble(
        (f"{sample['stream']}/{sample['id']}", "bold"), ": ", (end, STYLES.get(end, "")), _headline(story)
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    lines = (*_made(story), *_judged(story), *_ended(story))
    for at, what, more in _in_order(lines):
        table.add_row("" if at is None else f"{at:.3f} s", what, Text(safe_text(more)))
    return Group(head, table)


def render_output(lines: Sequence[LoggedLine]) -> RenderableType:
    """Render what bodies have printed for a sample, with their tracebacks; nothing if they have not."""
    if not lines:
        return Group()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(line.time, line.node, Text(safe_text(line.text)))
    return Group(Text("printed by its bodies", style="bold"), table)


def _in_order(lines: Iterable[Line]) -> list[Line]:
    """Sort lines by time, those without one last; details stay after the line that they belong to."""
    times: list[float] = []
    unsorted = list(lines)
    for at, what, _ in unsorted:
        times.append(at if at is not None else math.inf if what else times[-1])
    return [line for _, line in sorted(zip(times, unsorted, strict=True), key=lambda timed: timed[0])]


def _headline(story: SampleHistory) -> str:
    sample = story.sample
    if sample["end"] == "trained":
        lag = "" if sample["lag"] is None else f", lag {sample['lag']}"
        skipped = f" ({sample['reason']})" if sample["reason"] else ""
        return f" at step {sample['step']}{lag}{skipped}"
    if sample["end"] == "evaluated":
        return f" at version {sample['step']}"
    return f" ({sample['reason']})" if sample["reason"] else ""


def _made(story: SampleHistory) -> Iterator[Line]:
    sample = story.sample
    first = f"row {sample['row']}" + (f" of {story.dataset}" if story.dataset else "")
    version = "" if sample["version"] is None else f", weights of version {sample['version']}"
    ids = sorted([sample["id"], *(mate.id for mate in story.mates)])
    members = f" (samples {ids[0]} to {ids[-1]})" if story.mates else ""
    yield (
        sample["issued_at"],
        "issued",
        f"{first}, group {sample['group_id']}{members}, worker {sample['worker']}{version}",
    )
    if story.drawn is not None:
        yield None, "", f"its row was chosen by the sampler: {story.drawn}"
    for restart in story.restarts:
        yield restart.at, "interrupted", restart.reason
    if sample["finished_at"] is not None:
        yield sample["finished_at"], "generated" if story.segments else "encoded", _tokens(story)
    for number, member in enumerate(story.trajectories if len(story.trajectories) > 1 else (), 1):
        yield None, "", f"trajectory {number}: {_member(member)}"
    for weights in story.weights:
        yield None, "", f"version {weights.version} on {weights.replica} has the checksum {weights.digest}"


def _tokens(story: SampleHistory) -> str:
    sample = story.sample
    turns = f" in {sample['turns']} turns" if sample["turns"] > 1 else ""
    num = len(story.trajectories)
    family = f", {num:,} {'trajectory' if num == 1 else 'trajectories'}" if num else ""
    text = f"{sample['tokens']:,} tokens{turns}{family} ({sample['length']:,} with the prompt)"
    if len(story.segments) == 1:
        return f"{text}, by version {story.segments[0][0]}"
    runs = ", then ".join(f"{num:,} by version {version}" for version, num in story.segments)
    return f"{text}: {runs}" if runs else text


def _member(member: SampleTrajectory) -> str:
    turns = f" in {member.turns} turns" if member.turns > 1 else ""
    text = f"{member.tokens:,} tokens{turns} ({member.length:,} with the prompt)"
    if member.oldest is None:
        return text
    versions = member.oldest if member.oldest == member.newest else f"{member.oldest} to {member.newest}"
    return f"{text}, by version {versions}"


def _judged(story: SampleHistory) -> Iterator[Line]:
    refused_by = story.sample["node"] if story.sample["end"] == "refused" else None
    for node in story.computed:
        result = "did not keep it" if node.node == refused_by else "done"
        yield node.at, node.node, result if node.value is None else f"{node.field} {node.value:.6g}"
    if story.sample["accepted_at"] is not None:
        kept = [mate for mate in story.mates if mate.end != "refused"]
        lost = _lost(story.mates)
        kept_text = f"with {len(kept)} others of its group" if kept else ""
        yield story.sample["accepted_at"], "accepted", "; ".join(part for part in (kept_text, lost) if part)


def _lost(mates: tuple[GroupMember, ...]) -> str:
    lost = [
        f"{mate.id} was {mate.end} ({mate.reason})" for mate in mates if mate.end in ("refused", "dropped")
    ]
    return ", ".join(lost)


def _ended(story: SampleHistory) -> Iterator[Line]:
    sample, end = story.sample, story.sample["end"]
    if story.bound_at is not None:
        waited = story.bound_at - sample["accepted_at"]
        yield story.bound_at, "bound", f"to step {sample['step']}, after {waited:.3f} s in the queue"
    if end == "trained":
        skipped = f"; {sample['message']}" if sample["message"] else ""
        yield sample["ended_at"], end, f"step {sample['step']} is complete{_lag(story)}{skipped}"
    elif end == "evaluated":
        yield sample["ended_at"], end, f"with weights of version {sample['step']}"
    elif end == "refused":
        place = f" ({sample['place']})" if sample["place"] else ""
        message = sample["message"] or (_lost(story.mates) if sample["reason"] == "small_group" else "")
        yield (
            sample["ended_at"],
            end,
            f"by {sample['node']}{place}, {sample['reason']}" + (f": {message}" if message else ""),
        )
    elif end == "dropped":
        yield (
            sample["ended_at"],
            end,
            f"{sample['reason']}: step {sample['step']} was to be filled{_lag(story)}"
            + (f"; {sample['message']}" if sample["message"] else ""),
        )
    elif end == "unused":
        yield sample["ended_at"], end, f"the run ended ({sample['reason']}): {sample['message']}"
    elif story.closing is None:
        yield None, "", "no end recorded: the run continues, or was killed"


def _lag(story: SampleHistory) -> str:
    sample = story.sample
    if sample["lag"] is None:
        return ""
    bound = "" if story.max_lag is None else f" of at most {story.max_lag}"
    if sample["in_queue_lag"] is None:
        return f"; lag {sample['lag']}{bound}"
    parts = f"{sample['in_flight_lag']} in flight and {sample['in_queue_lag']} in the queue"
    return f"; lag {sample['lag']}{bound}, {parts}"
