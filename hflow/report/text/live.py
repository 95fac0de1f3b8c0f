"""What a run shows while it runs: a live panel in a terminal, plain lines elsewhere.

Both receive the same rows and know nothing else about the run. Every number keeps its column, and every line
its place, from the first step on, so that nothing jumps.
"""

from __future__ import annotations

import abc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hflow.base.terminal import SafeConsole
from hflow.base.text import format_share
from hflow.base.waiting import Awaited, awaited_text, print_waits
from hflow.report.text.notebook import NotebookLive
from hflow.runtime.records.activity import Activity

MAX_BINS = 9
"""Columns of the histogram of lags. The last one counts all larger lags too."""
BIN_WIDTH = 5
EPISODE_LABELS = {
    "pending": "pending",
    "generating": "generating",
    "processing_tools": "in tools",
    "interacting": "interacting",
    "terminated": "ended",
}
"""`types.EpisodeState` -> its heading, in the order of an episode's life."""


@dataclass(frozen=True)
class Lags:
    """Lags of trained samples over the last steps: lag -> share of the samples."""

    total: Mapping[int, float] = field(default_factory=dict)
    in_flight: Mapping[int, float] = field(default_factory=dict)
    """The part that arose while samples were generated."""
    in_queue: Mapping[int, float] = field(default_factory=dict)
    """The part that arose while samples waited."""
    maximum: int | None = None
    """The largest lag; None if nothing was trained."""


@dataclass(frozen=True)
class RolloutView:
    """Generation beside training."""

    version: int | None = None
    """Version of the weights that new samples are generated with; None before the first."""
    num_running: int = 0
    """Open groups."""
    num_queued: int = 0
    """Accepted groups that wait for their batch."""
    num_accepted: int = 0
    """Groups accepted since the start."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Reason -> samples that were refused since the start."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason -> samples that were dropped since the start, as they took too long."""
    num_interrupted: int = 0
    """Samples that were interrupted since the start."""
    num_kept_tokens: int = 0
    """Tokens that interrupted samples kept."""
    engines: float | None = None
    """Share of the time in which engines generated; None before the first step."""
    trainers: float | None = None
    """Share of the time in which training devices were busy; None before the first step."""
    lags: Lags = Lags()
    episodes: Mapping[str, int] = field(default_factory=dict)
    """`types.EpisodeState` -> episodes now (terminated: ever). Empty if none has taken a second turn."""
    runs_ahead: bool = True
    """Whether trained tokens can have a lag. If not, only the episodes are worth showing."""


def rollout_lines(view: RolloutView) -> Iterator[tuple[str, Text]]:
    """Yield the label and the text of each line of the panel."""
    if view.runs_ahead:
        version = "" if view.version is None else f"{view.version:>9,} on the engines"
        groups = {"running": view.num_running, "queued": view.num_queued, "accepted": view.num_accepted}
        yield "version", Text(version)
        yield "busy", Text(_columns(engines=_share(view.engines), trainers=_share(view.trainers)))
        yield "groups", Text(_columns(**{name: f"{num:,}" for name, num in groups.items()}))
        yield "refused", Text(_with_main_reason(view.refused))
        yield "dropped", Text(_with_main_reason(view.dropped))
        kept = f"{view.num_interrupted:>9,} samples, {view.num_kept_tokens:,} tokens kept"
        yield "interrupted", Text(kept)
        yield from _lag_table(view.lags)
    if view.episodes:
        yield from _episode_table(view.episodes)


def rollout_summary(view: RolloutView | None) -> list[str]:
    """Return the most important numbers, for a plain line."""
    if view is None or not view.runs_ahead or view.lags.maximum is None:
        return []
    return [
        f"staleness {_mean(view.lags.total):.3g}, at most {view.lags.maximum}",
        f"engines {_share(view.engines)}  trainers {_share(view.trainers)}",
    ]


def _columns(**cells: str) -> str:
    """Return numbers, each followed by its name."""
    return "".join(f"{cell:>9} {name:<8}" for name, cell in cells.items()).rstrip()


def _with_main_reason(samples: Mapping[str, int]) -> str:
    reason = max(samples, key=lambda name: samples[name], default="")
    return f"{sum(samples.values()):>9,} samples" + (f", mostly {reason}" if reason else "")


def _share(share: float | None) -> str:
    return "" if share is None else format_share(share)


def _mean(shares: Mapping[int, float]) -> float:
    return sum(lag * share for lag, share in shares.items())


def _lag_table(lags: Lags) -> Iterator[tuple[str, Text]]:
    """Yield the headings, and a row of shares in percent for the lag and for each of its parts."""
    rows = {"lag": lags.total, "in flight": lags.in_flight, "in queue": lags.in_queue}
    max_lag = max((lag for shares in rows.values() for lag in shares), default=0)
    num_bins = min(MAX_BINS, 1 + max_lag)
    heads = [str(lag) for lag in range(num_bins)]
    if max_lag >= MAX_BINS:
        heads[-1] += "+"
    yield "staleness", Text(_row("mean", "max", heads), style="dim")
    for name, shares in rows.items():
        cells = [_percent(share) for share in _binned(shares, num_bins)] if shares else [""] * num_bins
        maximum = "" if name != "lag" or lags.maximum is None else str(lags.maximum)
        yield f"  {name}", Text(_row(f"{_mean(shares):.2f}" if shares else "", maximum, cells))


def _binned(shares: Mapping[int, float], num_bins: int) -> list[float]:
    bins = [0.0] * num_bins
    for lag, share in shares.items():
        bins[min(lag, num_bins - 1)] += share
    return bins


def _percent(share: float) -> str:
    return "·" if not share else f"{100 * share:.0f}%"


def _row(mean: str, maximum: str, cells: list[str]) -> str:
    return f"{mean:>9}{maximum:>5} " + "".join(f"{cell:>{BIN_WIDTH}}" for cell in cells)


def _episode_table(episodes: Mapping[str, int]) -> Iterator[tuple[str, Text]]:
    widths = {state: max(9, len(label) + 2) for state, label in EPISODE_LABELS.items()}
    heads = "".join(f"{label:>{widths[state]}}" for state, label in EPISODE_LABELS.items())
    yield "episodes", Text(heads, style="dim")
    yield "", Text("".join(f"{episodes.get(state, 0):>{width},}" for state, width in widths.items()))


CURVE_WIDTH = 30
VALUE_WIDTH = 10
"""The most characters that a value with four digits takes."""
BAR_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class LiveRow:
    """The state of a run, as it is shown."""

    step: int
    """Completed steps."""
    num_steps: int
    values: Mapping[str, float] = field(default_factory=dict)
    """Label -> value to show. A label that a row leaves out keeps its last value."""
    tokens_per_second: float = 0.0
    seconds_per_step: float = 0.0
    """Average time of the last steps, from which the remaining time is estimated."""
    rollout: RolloutView | None = None
    """Generation beside training; None where they take turns."""

    @property
    def seconds_left(self) -> float:
        """Estimated time to the end of the run."""
        return (self.num_steps - self.step) * self.seconds_per_step


class Display(abc.ABC):
    """Shows rows. It is a context manager; leaving it restores the terminal."""

    _awaited: tuple[Awaited, float] | None = None

    @property
    def awaited(self) -> tuple[str, float] | None:
        """What is awaited while a run starts, and since when, in seconds since the epoch."""
        awaited = self._awaited
        return None if awaited is None else (awaited_text(awaited[0]), awaited[1])

    @contextmanager
    def wait_for(self, what: Awaited) -> Iterator[None]:
        """Show what is awaited, and for how long, while the context lasts."""
        before, self._awaited = self._awaited, (what, time.time())
        try:
            yield
        finally:
            self._awaited = before

    def follow(self, activity: Callable[[], Activity]) -> None:
        """Show what a run does within a step, as any thread finds it. A display that cannot does nothing."""
        return None

    @abc.abstractmethod
    def update(self, row: LiveRow) -> None:
        """Show a new row."""

    def refresh(self, row: LiveRow) -> None:
        """Show the state between two rows. A display that cannot do so does nothing."""
        return None

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Print a line once, such as the path of a checkpoint."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class PlainDisplay(Display):
    """Prints one line for the first step, every `every` steps, and the last step.

    A second row of a step that has a line, such as an evaluation, is printed with its values only.
    """

    def __init__(self, console: Console, every: int = 10) -> None:
        self._console = console
        self._every = every
        self._values: dict[str, float] = {}
        self._last_step = 0

    def update(self, row: LiveRow) -> None:
        """Print the row if it is due."""
        self._values.update(row.values)
        if row.step == self._last_step:
            if row.values:
                self.note("  ".join(_parts(row, row.values)))
        elif row.step in (1, row.num_steps) or row.step % self._every == 0:
            self._last_step = row.step
            rollout = rollout_summary(row.rollout)
            self.note("  ".join([*_parts(row, self._values), *rollout, *_speed(row)]))

    @contextmanager
    def wait_for(self, what: Awaited) -> Iterator[None]:
        """Print a line when the wait has taken 10, 20, 40 ... seconds."""
        with super().wait_for(what), print_waits(self.note)(what):
            yield

    def note(self, text: str) -> None:
        """Print a line without wrapping it."""
        self._console.print(text, soft_wrap=True, highlight=False)


class LiveDisplay(Display):
    """Redraws a panel in place: progress, speed, remaining time, values with their curves, the rollout."""

    def __init__(self, console: Console, title: str = "") -> None:
        self._title = title
        self._curves: dict[str, list[float]] = defaultdict(list)
        self._row: LiveRow | None = None
        self._activity: Callable[[], Activity] | None = None
        self._live = (
            NotebookLive(console, self._render)
            if console.is_jupyter
            else Live(console=console, refresh_per_second=4, transient=False, get_renderable=self._render)
        )

    def update(self, row: LiveRow) -> None:
        """Redraw with a new row."""
        for label, value in row.values.items():
            self._curves[label].append(value)
        self.refresh(row)

    def refresh(self, row: LiveRow) -> None:
        """Redraw with the row's progress and rollout, but without adding its values."""
        self._row = row

    def follow(self, activity: Callable[[], Activity]) -> None:
        """Show what happens within a step too, whenever the panel is drawn."""
        self._activity = activity

    def _render(self) -> Group:
        activity = Activity(awaited=self.awaited) if self._activity is None else self._activity()
        curves = {label: tuple(curve) for label, curve in tuple(self._curves.items())}
        return _panel(self._title, self._row, curves, activity, time.time())

    def note(self, text: str) -> None:
        """Print a line above the panel."""
        self._live.console.print(text, soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._activity = None
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.line()


def open_display(title: str = "", live: bool | None = None, console: Console | None = None) -> Display:
    """Return a live panel or plain lines; None: the panel if the console is a terminal or a notebook."""
    console = console or SafeConsole()
    as_panel = console.is_terminal or console.is_jupyter if live is None else live
    return LiveDisplay(console, title) if as_panel else PlainDisplay(console)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values, oldest first, as a curve of at most `width` characters.

    More values than that are averaged into `width` bins. The lowest bin is drawn as `▁` and the highest
    as `█`; if all are equal, as `▁`. Values that are not finite are left out.
    """
    bins = _bins([value for value in values if math.isfinite(value)], width)
    if not bins:
        return ""
    low, span = min(bins), max(bins) - min(bins)
    top = len(BAR_LEVELS) - 1
    return "".join(BAR_LEVELS[round((value - low) / span * top) if span else 0] for value in bins)


def _bins(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [len(values) * i // width for i in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _parts(row: LiveRow, values: Mapping[str, float]) -> list[str]:
    shown = [f"{label} {value:.4g}" for label, value in values.items()]
    return [f"step {row.step}/{row.num_steps}", *shown] if row.num_steps else shown


def _speed(row: LiveRow) -> list[str]:
    return [f"{row.tokens_per_second:,.0f} tokens/s", f"{_clock(row.seconds_left)} left"]


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def _panel(
    title: str, row: LiveRow | None, curves: Mapping[str, Sequence[float]], activity: Activity, now: float
) -> Group:
    lines = list(activity_lines(activity, now))
    if row is None:
        return Group(_table(lines, 0))
    lines += rollout_lines(row.rollout) if row.rollout else ()
    width = max((len(label) for label in (*curves, *(label for label, _ in lines))), default=0)
    values = _grid(min_width=width)
    values.add_column(justify="right", min_width=VALUE_WIDTH, no_wrap=True)
    for label, curve in curves.items():
        values.add_row(label, f"{curve[-1]:.4g}", Text(sparkline(curve, CURVE_WIDTH), style="cyan"))
    return Group(_head(title, row, activity, now), values, _table(lines, width))


def activity_lines(activity: Activity, now: float) -> Iterator[tuple[str, Text]]:
    """Yield the heading and the content of the lines that say what happens within a step."""
    if activity.phase is not None:
        phase, start = activity.phase
        yield "now", Text(f"{_clock(max(0.0, now - start)):>9} {phase}")
    elif activity.step_start is not None:
        yield "now", Text()
    if activity.step_start is not None:
        samples = [f"{done:>9,} of {wanted:,} {name}" for name, (done, wanted) in activity.samples.items()]
        elapsed = f"{_clock(max(0.0, now - activity.step_start)):>9} so far  "
        yield "this step", Text("".join([elapsed, *samples]))


def _table(lines: Sequence[tuple[str, Text]], width: int) -> Table:
    table = _grid(min_width=width)
    for label, line in lines:
        table.add_row(label, line)
    return table


def _head(title: str, row: LiveRow, activity: Activity, now: float) -> Table:
    """Return the first line. The bar takes the width that the text leaves."""
    tokens, left = _speed(row)
    if activity.step_start is not None:
        seconds = activity.seconds_left(row.num_steps - row.step, now)
        left = f"{_clock(seconds)} left" if activity.seconds_per_step else ""
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
    """Return a table without lines, with one column so far."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=min_width, no_wrap=True)
    return grid
