"""`Tally`: from the rows of a run's metrics to what is shown of generation beside training."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.text import Text

from hflow.report.formatting import share_text

WINDOW = 20
"""Steps over which shares and lags are averaged, so that they can be read."""
PARTS = ("lag", "in_flight", "in_queue")
"""The whole lag, and what it is made of."""


@dataclass(frozen=True)
class Rollout:
    """Generation beside training. Lags and shares are means over the last `WINDOW` steps."""

    version: int | None = None
    """Of the weights that fresh samples are drawn with; None before the first."""
    running: int = 0
    queued: int = 0
    accepted: int = 0
    """Groups: open, waiting for their batch, accepted since the start."""
    left: Mapping[str, int] = field(default_factory=dict)
    """`refused/REASON` and `dropped/REASON` -> samples since the start."""
    num_interrupted: int = 0
    num_kept: int = 0
    """Samples interrupted since the start, and the tokens that they had and went on from."""
    engines: float | None = None
    trainers: float | None = None
    """Shares of the time that they were busy; None before the first step."""
    lags: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Of `PARTS`: lag -> share of the samples."""
    max_lag: int | None = None
    """The largest lag of a trained sample in these steps."""
    episodes: Mapping[str, int] = field(default_factory=dict)
    """`types.EpisodeState` -> episodes now (ended: ever); empty where none took a second turn."""
    runs_ahead: bool = True
    """Whether a trained token can have a lag; of a synchronous run only `episodes` are worth showing."""

    def num_left(self, kind: str) -> int:
        """Samples that were `refused` or `dropped`."""
        return sum(num for name, num in self.left.items() if name.startswith(f"{kind}/"))

    def reason(self, kind: str) -> str:
        """Why most of them were; empty where there are none."""
        reasons = {name.partition("/")[2]: n for name, n in self.left.items() if name.startswith(f"{kind}/")}
        return max(reasons, key=lambda name: reasons[name], default="")

    def mean_lag(self, part: str) -> float | None:
        """Mean of one of `PARTS`; None where nothing was trained."""
        shares = self.lags.get(part)
        return sum(lag * share for lag, share in shares.items()) if shares else None


class Tally:
    """Keeps what the rows of single steps do not have: sums since the start, and means of the last steps.

    Args:
        runs_ahead: whether a trained token of the run can have a lag.
    """

    def __init__(self, *, runs_ahead: bool) -> None:
        self._runs_ahead = runs_ahead
        self._rows: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._totals: Counter[str] = Counter()
        self._now: dict[str, float] = {}
        self._episodes: dict[str, int] = {}

    def step(self, values: Mapping[str, float]) -> None:
        """Take a step's row."""
        self._rows.append(values)
        for name, value in values.items():
            if name.startswith(("refused/", "dropped/")) or name in _SUMMED:
                self._totals[name] += int(value)
        self._now.update((name, value) for name, value in values.items() if name.startswith("rollout/"))

    def glance(self, values: Mapping[str, float]) -> None:
        """Take how things stand between two steps."""
        for name, value in values.items():
            kind, _, state = name.partition("/")
            if kind == "episodes":
                self._episodes[state] = int(value)
            else:
                self._now[name] = value

    def rollout(self) -> Rollout | None:
        """What is to be shown; None where there is nothing beside the steps."""
        if not (self._runs_ahead or self._episodes):
            return None
        version = self._now.get("rollout/version")
        return Rollout(
            version=None if version is None else int(version),
            running=int(self._now.get("rollout/running", 0)),
            queued=int(self._now.get("rollout/queued", 0)),
            accepted=int(self._now.get("rollout/accepted", 0)),
            left={name: num for name, num in self._totals.items() if name not in _SUMMED},
            num_interrupted=self._totals["rollout/interrupted"],
            num_kept=self._totals["rollout/kept_tokens"],
            engines=self._mean("busy/engines"),
            trainers=self._mean("busy/trainers"),
            lags={part: self._shares(part) for part in PARTS},
            max_lag=max((int(row["staleness/max"]) for row in self._aged()), default=None),
            episodes=dict(self._episodes),
            runs_ahead=self._runs_ahead,
        )

    def _mean(self, name: str) -> float | None:
        """A share of the time, over the steps that are looked at."""
        seconds = sum(row["time/step_seconds"] for row in self._rows)
        busy = sum(row[name] * row["time/step_seconds"] for row in self._rows)
        return busy / seconds if seconds else None

    def _aged(self) -> list[Mapping[str, float]]:
        return [row for row in self._rows if "staleness/max" in row]

    def _shares(self, part: str) -> dict[int, float]:
        rows, shares = self._aged(), Counter[int]()
        for row in rows:
            for lag, share in _histogram(part, row.items()):
                shares[lag] += share / len(rows)  # type: ignore[assignment]
        return dict(sorted(shares.items()))


_SUMMED = ("rollout/interrupted", "rollout/kept_tokens")


def _histogram(part: str, values: Iterable[tuple[str, float]]) -> list[tuple[int, float]]:
    """Lag and share, of a row's values `staleness/PART_LAG`."""
    start = f"staleness/{part}_"
    found = ((name.removeprefix(start), share) for name, share in values if name.startswith(start))
    return [(int(lag), share) for lag, share in found]


# -------------------- What a panel and a plain line say of generation beside training.
# Every number keeps its column and every line its place from the first step on, so that nothing jumps.


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
