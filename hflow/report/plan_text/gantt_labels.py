"""Names under the bars of a chart: as many as there is room for, those of long bars first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.text import Text

NUM_LABEL_LINES = 2
LEAST_CUT = 4
"""Columns of a bar under which a name that has no room is cut short, and not left out."""

Label = tuple[int, str, str]
"""Column, node, and as much of its name as there is room for."""


def runs_of(cells: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """(name, start, stop) of each run of equal cells."""
    start = 0
    for stop in range(1, len(cells) + 1):
        if stop == len(cells) or cells[stop] != cells[start]:
            yield cells[start], start, stop
            start = stop


def bar_labels(cells: Sequence[str]) -> list[list[Label]]:
    """Names under their bars, in as many lines as they need; those of long bars have the first choice."""
    lines: list[list[Label]] = [[] for _ in range(NUM_LABEL_LINES)]
    runs = [run for run in runs_of(cells) if run[0]]
    for name, start, stop in sorted(runs, key=lambda run: run[1] - run[2]):
        rooms = [_room(line, start, len(cells)) for line in lines]
        best = next((i for i, room in enumerate(rooms) if room >= len(name)), rooms.index(max(rooms)))
        if rooms[best] >= len(name):
            lines[best].append((start, name, name))
        elif min(rooms[best], stop - start) >= LEAST_CUT:
            lines[best].append((start, name, f"{name[: rooms[best] - 1]}…"))
    return [sorted(line) for line in lines if line]


def _room(line: Sequence[Label], start: int, columns: int) -> int:
    """Columns from `start` to the next label of a line, a space left out; 0 where one covers it."""
    before = max((column + len(shown) for column, _, shown in line if column <= start), default=-1)
    after = min((column for column, _, _ in line if column > start), default=columns + 1)
    return after - start - 1 if before < start else 0


def label_line(labels: Iterable[Label], colours: Mapping[str, str]) -> Text:
    """One line of labels, each in its node's colour."""
    line = Text()
    for column, name, shown in labels:
        line.append(" " * (column - len(line))).append(shown, colours[name])
    return line
