"""What a panel and a plain line say of generation beside training.

Every number keeps its column and every line its place from the first step on, so that nothing jumps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.text import Text

from hflow.report.rollout import PARTS, Rollout
from hflow.report.words import share_text

MAX_BINS = 9
"""Columns of the histogram; the last one takes all lags from there on."""
BIN_WIDTH = 5
STATES = {
    "pending": "pending",
    "generating": "generating",
    "processing_tools": "in tools",
    "interacting": "interacting",
    "terminated": "ended",
}
"""`types.EpisodeState` -> its heading, in the order of an episode's life."""
NAMES = dict(zip(PARTS, ("lag", "in flight", "in queue"), strict=True))


def rollout_lines(rollout: Rollout) -> Iterator[tuple[str, Text]]:
    """Label and content of each line of the panel."""
    if rollout.runs_ahead:
        yield "version", Text(_version(rollout))
        yield "busy", Text(_columns(engines=_share(rollout.engines), trainers=_share(rollout.trainers)))
        yield "groups", Text(_groups(rollout))
        yield "refused", Text(_left(rollout, "refused"))
        yield "dropped", Text(_left(rollout, "dropped"))
        kept = f"{rollout.num_interrupted:>9,} samples, {rollout.num_kept:,} tokens kept"
        yield "interrupted", Text(kept)
        yield from _staleness(rollout)
    if rollout.episodes:
        yield from _episodes(rollout.episodes)


def rollout_words(rollout: Rollout | None) -> list[str]:
    """The same for a plain line, short."""
    if rollout is None or not rollout.runs_ahead or rollout.max_lag is None:
        return []
    return [
        f"staleness {rollout.mean_lag('lag'):.3g}, at most {rollout.max_lag}",
        f"engines {_share(rollout.engines)}  trainers {_share(rollout.trainers)}",
    ]


def _version(rollout: Rollout) -> str:
    return "" if rollout.version is None else f"{rollout.version:>9,} on the engines"


def _groups(rollout: Rollout) -> str:
    counts = {"running": rollout.running, "queued": rollout.queued, "accepted": rollout.accepted}
    return _columns(**{name: f"{count:,}" for name, count in counts.items()})


def _columns(**cells: str) -> str:
    """Numbers, each before its name."""
    return "".join(f"{cell:>9} {name:<8}" for name, cell in cells.items()).rstrip()


def _left(rollout: Rollout, kind: str) -> str:
    reason = rollout.reason(kind)
    return f"{rollout.num_left(kind):>9,} samples" + (f", mostly {reason}" if reason else "")


def _share(share: float | None) -> str:
    return "" if share is None else share_text(share)


def _staleness(rollout: Rollout) -> Iterator[tuple[str, Text]]:
    """A row of shares for the lag and for each of its parts, in percent."""
    num_bins = min(MAX_BINS, 1 + max((lag for shares in rollout.lags.values() for lag in shares), default=0))
    heads = [str(lag) for lag in range(num_bins)]
    if any(lag >= MAX_BINS for shares in rollout.lags.values() for lag in shares):
        heads[-1] += "+"
    yield "staleness", Text(_row("mean", "max", heads), style="dim")
    for part, name in NAMES.items():
        shares, mean = rollout.lags.get(part, {}), rollout.mean_lag(part)
        cells = [_percent(share) for share in _binned(shares, num_bins)] if shares else [""] * num_bins
        largest = "" if part != "lag" or rollout.max_lag is None else str(rollout.max_lag)
        yield f"  {name}", Text(_row("" if mean is None else f"{mean:.2f}", largest, cells))


def _binned(shares: Mapping[int, float], num_bins: int) -> list[float]:
    bins = [0.0] * num_bins
    for lag, share in shares.items():
        bins[min(lag, num_bins - 1)] += share
    return bins


def _percent(share: float) -> str:
    return "·" if not share else f"{100 * share:.0f}%"


def _row(mean: str, largest: str, cells: list[str]) -> str:
    return f"{mean:>9}{largest:>5} " + "".join(f"{cell:>{BIN_WIDTH}}" for cell in cells)


def _episodes(episodes: Mapping[str, int]) -> Iterator[tuple[str, Text]]:
    """A row of headings, and one of numbers."""
    widths = {state: max(9, len(head) + 2) for state, head in STATES.items()}
    heads = "".join(f"{head:>{widths[state]}}" for state, head in STATES.items())
    yield "episodes", Text(heads, style="dim")
    yield "", Text("".join(f"{episodes.get(state, 0):>{width},}" for state, width in widths.items()))
