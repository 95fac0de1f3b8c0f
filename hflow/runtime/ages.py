"""`Ages`: how stale the samples of a batch are, in flight and in the queue.

The lag of a token is the step that trains it less the version of the weights that drew it. A sample's is that
of its oldest token, and has two parts: what the weights moved on while it was drawn (from its oldest token to
its newest), and while it waited (from its newest token to its step).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


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

        Means over samples of the whole lag and of its parts, its maximum, and `staleness/lag_N`, the share of
        samples with that lag.
        """
        aged = [self._versions.pop(sample) for sample in samples if sample in self._versions]
        if not aged:
            return {}
        lags = Counter(step - oldest for oldest, _ in aged)
        shares = {f"staleness/lag_{lag}": count / len(aged) for lag, count in sorted(lags.items())}
        return {
            "staleness/mean": sum(step - oldest for oldest, _ in aged) / len(aged),
            "staleness/in_flight": sum(newest - oldest for oldest, newest in aged) / len(aged),
            "staleness/in_queue": sum(step - newest for _, newest in aged) / len(aged),
            "staleness/max": float(max(lags)),
            **shares,
        }
