"""`Ages`: how stale the samples of a batch are, in flight and in the queue.

The lag of a token is the step that trains it less the version of the weights that drew it. A sample's is that
of its oldest token, and has two parts: what the weights moved on while it was drawn (from its oldest token to
its newest), and while it waited (from its newest token to its step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class Ages:
    """The versions of one stream's samples between their arrival and their step."""

    def __init__(self) -> None:
        self._versions: dict[int, tuple[int, int]] = {}
        """Sample -> versions of its oldest and its newest token; not of samples without generated tokens."""

    def arrive(self, sample: int, oldest: int, newest: int) -> None:
        """A sample was generated."""
        if oldest >= 0:
            self._versions[sample] = oldest, newest

    def forget(self, samples: Iterable[int]) -> None:
        """Samples that will not be trained."""
        for sample in samples:
            self._versions.pop(sample, None)

    def bind(self, samples: Iterable[int], step: int) -> dict[str, float]:
        """What a step's row says of the samples that it trains; they are forgotten.

        Means over samples of the whole lag and of its parts, its maximum, and the histograms of all three:
        `staleness/lag_N`, `in_flight_N` and `in_queue_N` are shares of samples.
        """
        aged = [self._versions.pop(sample) for sample in samples if sample in self._versions]
        if not aged:
            return {}
        lags = [step - oldest for oldest, _ in aged]
        in_flight = [newest - oldest for oldest, newest in aged]
        in_queue = [step - newest for _, newest in aged]
        return {
            "staleness/mean": sum(lags) / len(aged),
            "staleness/in_flight": sum(in_flight) / len(aged),
            "staleness/in_queue": sum(in_queue) / len(aged),
            "staleness/max": float(max(lags)),
            **_shares("lag", lags),
            **_shares("in_flight", in_flight),
            **_shares("in_queue", in_queue),
        }


def _shares(name: str, lags: Sequence[int]) -> dict[str, float]:
    """A histogram: the share of each lag that occurs."""
    return {f"staleness/{name}_{lag}": num / len(lags) for lag, num in sorted(Counter(lags).items())}
