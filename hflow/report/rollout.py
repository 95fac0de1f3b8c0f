"""`Tally`: from the rows of a run's metrics to what is shown of generation beside training."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
