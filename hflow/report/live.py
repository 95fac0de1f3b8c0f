"""What a run shows while it runs: a live panel in a terminal, plain lines elsewhere.

Both take the same rows, and know nothing of the run that makes them.
"""

from __future__ import annotations

import abc
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hflow.report.live_rollout import Rollout, rollout_lines, rollout_words

# -------------------- A curve in one line of text.


LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values, oldest first, in at most `width` characters.

    More values than that are averaged into `width` bins. The lowest bin is drawn `▁`, the highest
    `█`; equal ones all `▁`. What is not finite is left out.
    """
    bins = _bins([value for value in values if math.isfinite(value)], width)
    if not bins:
        return ""
    low, span = min(bins), max(bins) - min(bins)
    top = len(LEVELS) - 1
    return "".join(LEVELS[round((value - low) / span * top) if span else 0] for value in bins)


def _bins(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


CURVE_WIDTH = 30
VALUE_WIDTH = 10
"""Characters of a value in four digits, at most."""


@dataclass(frozen=True)
class LiveRow:
    """Where a run stands."""

    step: int
    """Steps done."""
    num_steps: int
    values: Mapping[str, float] = field(default_factory=dict)
    """What to show, by its label: a label that a row leaves out keeps its last value."""
    tokens_per_second: float = 0.0
    seconds_per_step: float = 0.0
    """Recent time of a step, from which the time left is foretold."""
    rollout: Rollout | None = None
    """Generation beside training; None where one waits for the other."""

    @property
    def seconds_left(self) -> float:
        """Foretold seconds to the end."""
        return (self.num_steps - self.step) * self.seconds_per_step


class Display(abc.ABC):
    """Shows rows. A context manager: leaving it gives the terminal back."""

    @abc.abstractmethod
    def update(self, row: LiveRow) -> None:
        """Show a new row."""

    def glance(self, row: LiveRow) -> None:
        """Show how things stand between two rows, where that can be seen."""
        return None

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Say something once, such as where a checkpoint was written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainDisplay(Display):
    """One line for the first step, every `every` steps, and the last.

    A second row of a step that has its line, such as an evaluation, is a line of its values only.
    """

    def __init__(self, console: Console, every: int = 10) -> None:
        self._console = console
        self._every = every
        self._values: dict[str, float] = {}
        self._last = 0

    def update(self, row: LiveRow) -> None:
        """Print the row if its turn has come."""
        self._values.update(row.values)
        if row.step == self._last:
            if row.values:
                self.note("  ".join(_parts(row, row.values)))
        elif row.step in (1, row.num_steps) or row.step % self._every == 0:
            self._last = row.step
            words = rollout_words(row.rollout)
            self.note("  ".join([*_parts(row, self._values), *words, *_speed(row)]))

    def note(self, text: str) -> None:
        """Print a line, unwrapped."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


class LiveDisplay(Display):
    """A panel that is redrawn in place: progress, values with their curves, speed, time left, the rollout."""

    def __init__(self, console: Console, title: str = "") -> None:
        self._title = title
        self._curves: dict[str, list[float]] = defaultdict(list)
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def update(self, row: LiveRow) -> None:
        """Redraw with a new row."""
        for label, value in row.values.items():
            self._curves[label].append(value)
        self.glance(row)

    def glance(self, row: LiveRow) -> None:
        """Redraw with the row's progress and rollout, but without its values."""
        self._live.update(_panel(self._title, row, self._curves))

    def note(self, text: str) -> None:
        """Print a line above the panel."""
        self._live.console.print(text, soft_wrap=True, markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.line()


def open_display(title: str = "", live: bool | None = None, console: Console | None = None) -> Display:
    """The display that fits where output goes.

    Args:
        title: what the panel is headed with, usually the run's name.
        live: True for the panel, False for lines, None to let the console's being a terminal decide.
        console: where to print; standard output by default.
    """
    console = console or Console()
    as_panel = console.is_terminal if live is None else live
    return LiveDisplay(console, title) if as_panel else PlainDisplay(console)


def _parts(row: LiveRow, values: Mapping[str, float]) -> list[str]:
    shown = [f"{label} {value:.4g}" for label, value in values.items()]
    return [f"step {row.step}/{row.num_steps}", *shown]


def _speed(row: LiveRow) -> list[str]:
    return [f"{row.tokens_per_second:,.0f} tokens/s", f"{_clock(row.seconds_left)} left"]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _panel(title: str, row: LiveRow, curves: Mapping[str, Sequence[float]]) -> Group:
    lines = list(rollout_lines(row.rollout)) if row.rollout else []
    width = max((len(label) for label in (*curves, *(label for label, _ in lines))), default=0)
    values = _grid(min_width=width)
    values.add_column(justify="right", min_width=VALUE_WIDTH, no_wrap=True)
    for label, curve in curves.items():
        values.add_row(label, f"{curve[-1]:.4g}", Text(sparkline(curve, CURVE_WIDTH), style="cyan"))
    rollout = _grid(min_width=width)
    for label, line in lines:
        rollout.add_row(label, line)
    return Group(_head(title, row), values, rollout)


def _head(title: str, row: LiveRow) -> Table:
    """One line; the bar takes what the words leave."""
    tokens, left = _speed(row)
    step = f"step {row.step:>{len(str(row.num_steps))}}/{row.num_steps}"
    head = _grid()
    head.add_column(no_wrap=True)
    head.add_column(max_width=CURVE_WIDTH)
    head.add_column(no_wrap=True, justify="right")
    head.add_column(no_wrap=True)
    head.add_row(
        Text(title, style="bold"), step, ProgressBar(total=row.num_steps, completed=row.step), tokens, left
    )
    return head


def _grid(min_width: int | None = None) -> Table:
    """A table without lines, of a first column so far."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=min_width, no_wrap=True)
    return grid
