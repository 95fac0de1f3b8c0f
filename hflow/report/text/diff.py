"""The output of `hflow plan --diff`: what changed between two plans, by topic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hflow.planner.diff import Change, Effect, PlanDiff

_STYLES = {Effect.SAME: "dim", Effect.NEW: "yellow", Effect.RESHARD: "cyan", Effect.REFUSE: "bold red"}
_NUM_SHORT = 12
"""Number of digits of a digest that are shown."""
_ABSENT = "-"


def render_diff(diff: PlanDiff, before: str, after: str) -> RenderableType:
    """Render the differences between two plans with these names, then what they mean for a resume."""
    parts: list[RenderableType] = [
        Text.assemble(("- ", "red"), f"{before}  ", (diff.before[:_NUM_SHORT], "dim")),
        Text.assemble(("+ ", "green"), f"{after}  ", (diff.after[:_NUM_SHORT], "dim")),
    ]
    for topic, changes in groupby(diff.changes, key=lambda change: change.topic):
        parts += [Text(""), Text(topic, style="bold"), Padding(_table(changes), (0, 0, 0, 2))]
    return Group(*parts, Text(""), Text(diff.verdict, style=f"bold {_STYLES[diff.effect]}"))


def _table(changes: Iterable[Change]) -> Table:
    table = Table.grid(padding=(0, 2))
    for ratio in (4, 3, 3):
        table.add_column(overflow="fold", ratio=ratio)
    table.add_column(no_wrap=True, width=max(map(len, Effect)))
    table.expand = True
    for subjects, change in _alike(changes):
        table.add_row(
            Text(_joined(subjects)),
            Text(change.before or _ABSENT, style="red"),
            Text(change.after or _ABSENT, style="green"),
            Text(change.effect, style=_STYLES[change.effect]),
        )
    return table


def _joined(subjects: list[str]) -> str:
    """Join subjects in one line; words that all of them end with appear once."""
    words = [subject.split(" ") for subject in subjects]
    shared = 0
    while len({name[-1 - shared] for name in words}) == 1 and min(map(len, words)) > shared + 1:
        shared += 1
    if shared == 0 or len(words) == 1:
        return ", ".join(subjects)
    return " ".join([", ".join(" ".join(name[:-shared]) for name in words), *words[0][-shared:]])


def _alike(changes: Iterable[Change]) -> Iterator[tuple[list[str], Change]]:
    """Group the subjects of a topic that changed in the same way."""
    rows: dict[tuple[str | None, str | None, Effect], list[Change]] = {}
    for change in changes:
        rows.setdefault((change.before, change.after, change.effect), []).append(change)
    for same in rows.values():
        yield [change.subject for change in same], same[0]
