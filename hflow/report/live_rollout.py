"""What the live panel and the plain lines show of generation beside training.

Every number keeps its column, and every line its place, from the first step on, so that nothing jumps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.text import Text

from hflow.report.formatting import share_text

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
    return "" if share is None else share_text(share)


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
    """Yield a row of headings and a row of numbers."""
    widths = {state: max(9, len(label) + 2) for state, label in EPISODE_LABELS.items()}
    heads = "".join(f"{label:>{widths[state]}}" for state, label in EPISODE_LABELS.items())
    yield "episodes", Text(heads, style="dim")
    yield "", Text("".join(f"{episodes.get(state, 0):>{width},}" for state, width in widths.items()))
